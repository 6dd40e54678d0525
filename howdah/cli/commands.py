"""The table of commands: registers the functions of the other modules under their names."""

from typing import Annotated

import typer

from howdah.cli import (
    bench,
    check,
    cluster,
    draw,
    evaluate,
    init,
    lists,
    measure,
    members,
    plan,
    runs,
    sample,
    train,
    validate,
    verify,
)

app = typer.Typer(
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    help="Plan, verify, train and resume transformer language models on more than one device.",
)


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(f"howdah {version('howdah')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="show the version")
    ] = False,
) -> None:
    pass


app.command()(init.init)
app.command()(train.train)
app.command()(members.server)
app.command()(members.worker)
app.command()(verify.verify)
app.command()(sample.sample)
app.command("eval")(evaluate.evaluate)
app.command()(runs.export)
app.command()(runs.doctor)
app.command()(measure.measure)
app.command()(plan.plan)
app.command()(plan.simulate)
app.command()(check.check)
app.command()(plan.trace)
app.command()(lists.presets)
app.command()(lists.keys)
app.command()(lists.recipes)
plan.draw_app.command("collective")(draw.draw_collective)
plan.draw_app.command("experts")(draw.draw_experts)
app.add_typer(plan.draw_app, name="draw")
app.add_typer(cluster.cluster_app, name="cluster")
app.add_typer(bench.bench_app, name="bench")
app.add_typer(validate.validate_app, name="validate")
