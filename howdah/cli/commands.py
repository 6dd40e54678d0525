"""The table of commands: registers the functions of the other modules under their names."""

import typer

from howdah.cli import bench, plan, runs, train

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Plan, verify, train and resume transformer language models on more than one device.",
)

app.command()(train.train)
app.command()(train.verify)
app.command()(runs.sample)
app.command()(runs.export)
app.command()(runs.doctor)
app.command()(plan.plan)
app.command()(plan.simulate)
app.command()(plan.check)
app.command()(plan.trace)
app.add_typer(plan.draw_app, name="draw")
app.add_typer(plan.cluster_app, name="cluster")
app.add_typer(bench.bench_app, name="bench")
