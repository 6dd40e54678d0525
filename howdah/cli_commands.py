"""The commands by name, and the files that hold them."""

import typer

from howdah import cli_bench, cli_plan, cli_runs, cli_train

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Plan, verify, train and resume transformer language models on more than one device.",
)

app.command()(cli_train.train)
app.command()(cli_train.verify)
app.command()(cli_runs.sample)
app.command()(cli_runs.export)
app.command()(cli_runs.doctor)
app.command()(cli_plan.plan)
app.command()(cli_plan.simulate)
app.command()(cli_plan.check)
app.command()(cli_plan.trace)
app.add_typer(cli_plan.draw_app, name="draw")
app.add_typer(cli_plan.cluster_app, name="cluster")
app.add_typer(cli_bench.bench_app, name="bench")
