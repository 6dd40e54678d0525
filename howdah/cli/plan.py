"""The commands that run nothing: plan, simulate, trace, draw, cluster. None loads torch.

Each command converts its options to plain data, calls one function of the packages that plan,
simulate or draw, and prints the result.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from howdah.base.atomic import write_text
from howdah.base.errors import UserError, named, several, shown
from howdah.base.files import kind_of
from howdah.base.quantities import parse_count, parse_quantity, spell, with_unit
from howdah.cli.auto import like_cores
from howdah.cli.environment import cluster_named
from howdah.cli.fits import refuse_small_homes, refuse_what_does_not_fit
from howdah.cli.search import Asked, find, is_search
from howdah.config.drafts import Draft, Drafted, draft
from howdah.config.recipe import load_run, plan_of
from howdah.config.shipped import which
from howdah.draw import served_trace
from howdah.draw.drawn_plan import Planned, draw_plan
from howdah.draw.measured_step import compare_step, report, to_perfetto, to_svg
from howdah.draw.perfetto import trace as trace_json
from howdah.draw.pictures import put, require_place, require_svg
from howdah.draw.schedule import draw as draw_timeline
from howdah.draw.schedule_svg import draw_svg as timeline_svg
from howdah.draw.tables import (
    model_data,
    prediction_data,
    show_model,
    show_notes,
    show_prediction,
    spell_basis,
    spell_causes,
)
from howdah.machines.cluster import Cluster
from howdah.machines.cluster_file import HERE, split_size
from howdah.plan.layout import parse_layout, resolve
from howdah.plan.plan import Plan
from howdah.plan.schedule.actions import Schedule
from howdah.plan.schedule.check import check_schedule, draw_standstill
from howdah.plan.schedule.registry import SCHEDULES, build
from howdah.plan.schedule.text import format_schedule, read_schedule
from howdah.plan.trace_file import FOLDER as TRACE
from howdah.plan.trace_file import read_members, read_traces
from howdah.search.notes import notes_on
from howdah.sim.measured import profile_for
from howdah.sim.predict import predict
from howdah.sim.profile import named_profile
from howdah.sim.step_time import step_time
from howdah.sim.timeline import simulate as time_actions
from howdah.train.notes import empty_places

draw_app = typer.Typer(
    no_args_is_help=True, help="Draw a schedule, memory, the mesh, traffic, a collective."
)

Model = Annotated[str, typer.Argument(help="a recipe, a preset, or a config.json of Hugging Face")]
LayoutText = Annotated[str, typer.Option("--layout", help='such as "pp2 dp* tp2 zero1 x8"')]
ClusterText = Annotated[str, typer.Option("--cluster", help="NAME, NAMExDEVICES or a .toml file")]
Keys = Annotated[
    list[str] | None, typer.Argument(help="changes of single keys, such as model.layers=40")
]
Sequence = Annotated[
    int | None, typer.Option(help="tokens of a sample; by default of the model, at most 8192")
]
MicroBatch = Annotated[
    int | None, typer.Option(help="samples of a micro-batch; by default 1, or the recipe's")
]
GlobalBatch = Annotated[
    int | None, typer.Option(help="samples of a step; by default it follows from the layout")
]
PrecisionText = Annotated[
    str,
    typer.Option(
        help="bf16, float32, float64, fp16, fp8, mxfp8 or nvfp4; of a search several, with commas"
    ),
]
Svg = Annotated[Path | None, typer.Option(help="write the drawing to this SVG file instead")]


def plan(  # noqa: PLR0913, PLR0917  each is an option of the command
    model: Model,
    keys: Keys = None,
    cluster: ClusterText = "",
    layout: LayoutText = "",
    tokens: Annotated[str, typer.Option(help="of the whole run, such as 15T")] = "",
    rent: Annotated[str, typer.Option(help="USD for an hour of a device, such as 2.50")] = "",
    sequence: Sequence = None,
    micro_batch: MicroBatch = None,
    global_batch: GlobalBatch = None,
    precision: PrecisionText = "",
    profile: Annotated[str, typer.Option(help="of another framework, such as megatron-core")] = "",
    find_layout: Annotated[
        bool, typer.Option("--search", help="for a layout, although the recipe has one")
    ] = False,
    budget: Annotated[str, typer.Option(help='of a search, such as "days<30 money<2M"')] = "",
    devices: Annotated[str, typer.Option(help="search on several sizes, such as 64..4096")] = "",
    fewest: Annotated[bool, typer.Option(help="search for the fewest devices")] = False,
    largest: Annotated[bool, typer.Option(help="search for the largest model that fits")] = False,
    plot: Annotated[Path | None, typer.Option(help="an SVG of the time over devices")] = None,
    every: Annotated[
        bool, typer.Option("--all", help="search also what can be planned, but not run yet")
    ] = False,
    write: Annotated[Path | None, typer.Option(help="a recipe with the layout found")] = None,
    why: Annotated[bool, typer.Option(help="every stage, and where the numbers are from")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="everything, for programs")] = False,
) -> None:
    """Predict memory, traffic, time and cost of training MODEL with a layout; without a layout,
    search for the fastest on a cluster.

    Exit code 2: it does not fit.
    """
    count, rate = _asked(tokens, rent, cluster)
    wanted = Draft(layout, sequence, micro_batch, global_batch, precision, tuple(keys or ()))
    framework = named_profile(profile) if profile else None
    asked = Asked(
        *(cluster, count, rate, budget, devices, fewest, largest, every),
        *(write, plot, framework, as_json),
    )
    searched = find_layout or fewest or largest or every or any([budget, devices, write, plot])
    if searched or is_search(model, wanted, cluster):
        _refuse_a_layout(model, wanted, cluster, why=why)
        return find(model, wanted, asked)
    machines = cluster_named(cluster) if cluster else None
    found = _drafted(model, wanted, cluster, machines)
    meant = [told] if (told := which(model, models=True)) else []
    lines = [*meant, *show_model(found.name, found.shape, found.sequence)]
    if found.plan is None:
        if why:
            raise UserError(
                "--why says nothing of a model alone; give a --layout or a --cluster too"
            )
        data = model_data(found.shape, found.sequence)
        lines += show_notes(found.notes)
        print(json.dumps(data, indent=2) if as_json else "\n".join(lines))
        return
    prediction = predict(found.plan, machines, tokens=count, rent=rate, profile=framework)
    notes = [*found.notes, *notes_on(found.plan, machines, tuned=found.tuned)]
    notes += empty_places(found.plan)
    if as_json:
        print(json.dumps(prediction_data(prediction, [*meant, *notes]), indent=2))
    else:
        print("\n".join([*lines, *show_prediction(prediction, why=why, notes=notes)]))
    refuse_what_does_not_fit(prediction, cluster)
    if machines:
        refuse_small_homes(prediction.plan, machines, cluster)


def _refuse_a_layout(model: str, wanted: Draft, cluster: str, *, why: bool) -> None:
    """Raises UserError for what a search cannot take, or lacks."""
    auto = is_search(model, wanted, "")
    if not (cluster or auto):
        raise UserError("a search needs machines; give a --cluster")
    if not auto and (wanted.layout or any(key.startswith("layout=") for key in wanted.keys)):
        raise UserError(
            "a search finds the layout; drop the layout, or what asks for a search: --write, "
            "--devices, --fewest, --largest, --plot, --budget"
        )
    if why:
        raise UserError("--why explains one layout; give the one that you mean with --layout")


def _asked(tokens: str, rent: str, cluster: str) -> tuple[int, float | None]:
    """The tokens of a run (0: no costs are wanted), and USD per device and hour."""
    if tokens and not cluster:
        raise UserError("--tokens asks for the time and cost of a run; say where, with a --cluster")
    if rent and not tokens:
        raise UserError("--rent is the price of a run's hours; say how long it is, with --tokens")
    if not rent:
        return parse_count(tokens) if tokens else 0, None
    if rent.lstrip().startswith("-"):
        raise UserError(f"--rent {shown(rent)} is below 0; give USD per device and hour")
    if not (rate := parse_quantity(with_unit(rent, "USD/h"), "USD/h", where="--rent")):
        raise UserError("--rent is 0, which is no price; leave it out for devices that you own")
    return parse_count(tokens), rate


def _drafted(model: str, wanted: Draft, cluster: str, devices: Cluster | None) -> Drafted:
    number = devices.devices if devices else None
    return draft(model, wanted, devices=number, cluster=split_size(cluster)[0])


def simulate(
    recipe: Annotated[Path, typer.Argument(help="a recipe (.toml)")],
    overrides: Annotated[list[str] | None, typer.Argument(help='such as layout="pp2 x4"')] = None,
    cluster: ClusterText = "",
    svg: Svg = None,
    trace: Annotated[Path | None, typer.Option(help="write a trace for Perfetto")] = None,
) -> None:
    """Draw when every pipeline rank does what in one step of RECIPE on a cluster, or on as many
    cores of one machine.
    """
    require_svg(svg)
    require_place(trace)
    drafted = _recipe(recipe, overrides or [], cluster)
    assert drafted.plan is not None
    machine = _fitted(cluster, drafted)
    time = step_time(drafted.plan, machine, profile_for(machine, drafted.plan.method))
    if trace:
        put(trace_json(time.timeline), trace)
    if svg:
        put(timeline_svg(time.timeline), svg)
        return
    print(draw_timeline(time.timeline, width=72 / time.timeline.makespan))
    where = cluster or f"{machine.devices} cores"
    takes = f"a step takes {spell(time.seconds, 'seconds')}"
    print(f"on {where}{spell_basis(time)}, {takes}: {spell_causes(time.breakdown)}")


def _recipe(recipe: Path, overrides: list[str], cluster: str) -> Drafted:
    run = load_run(recipe, overrides)
    devices = cluster_named(cluster).devices if cluster else None
    return draft(run, Draft(), devices=devices if "dp*" in run.layout.split() else None)


def _fitted(cluster: str, drafted: Drafted) -> Cluster:
    """The cluster with as many devices as the plan has ranks."""
    assert drafted.plan is not None
    world = drafted.plan.layout.world
    return cluster_named(cluster, devices=world) if cluster else like_cores(world)


# -- draw ------------------------------------------------------------------------------


@draw_app.command("schedule")
def draw_schedule(  # noqa: PLR0913, PLR0917
    name: Annotated[str, typer.Argument(help=f"{', '.join(SCHEDULES)}, or a file of one")],
    pp: Annotated[int | None, typer.Option(help="pipeline ranks; 4 if not given")] = None,
    micros: Annotated[int | None, typer.Option(help="micro-batches; 8 if not given")] = None,
    virtual: Annotated[int | None, typer.Option(help="stages on each rank")] = None,
    slices: Annotated[int | None, typer.Option(help="token slices of a micro-batch")] = None,
    svg: Svg = None,
    text: Annotated[
        bool, typer.Option(help="as a file that can be changed and read again")
    ] = False,
) -> None:
    """Draw a schedule: a forward takes one second, a backward two."""
    require_svg(svg)
    given = {"ranks": pp, "micros": micros, "virtual": virtual, "slices": slices}
    sizes = {word: number for word, number in given.items() if number is not None}
    if name in SCHEDULES or kind_of(Path(name)) == "does not exist":
        schedule = build(name, **{"ranks": 4, "micros": 8, **sizes})
    elif sizes:
        raise UserError(
            f"{named(name)} says its own sizes; drop --pp, --micros, --virtual and --slices"
        )
    else:
        schedule = _own_schedule(Path(name))
    if text and svg:
        raise UserError("--text prints a schedule and --svg draws it; give one of the two")
    if text:
        print(format_schedule(schedule), end="")
        return
    timeline = time_actions(schedule)
    put(timeline_svg(timeline) if svg else draw_timeline(timeline), svg)
    if not svg and name in SCHEDULES and not SCHEDULES[name].keeps:  # its updates have no boxes
        print(f"{name}: {SCHEDULES[name].about}")


def _own_schedule(path: Path) -> Schedule:
    """The user's own schedule in a file. If it is wrong, prints where it stops, and raises
    UserError.
    """
    schedule = read_schedule(path)
    problems = check_schedule(schedule)
    if problems:
        print(draw_standstill(schedule))
        raise UserError(f"{named(path)}: {several(problems)}")
    return schedule


def _draw_plan(what: Planned, model: str, wanted: Draft, cluster: str, svg: Path | None) -> None:
    require_svg(svg)
    devices = cluster_named(cluster) if cluster else None
    found = _drafted(model, wanted, cluster, devices)
    plan = found.plan or draft(model, replace(wanted, layout="single"), devices=None).plan
    assert plan is not None
    drawn = draw_plan(what, predict(plan, devices), found.name, svg=svg is not None)
    if not svg and (told := which(model, models=True)):
        print(told)
    put(drawn, svg)


def _drawer(what: Planned, words: str) -> Callable[..., None]:
    """The command that draws one thing of a plan."""

    def command(
        model: Model,
        keys: Keys = None,
        layout: LayoutText = "",
        cluster: ClusterText = "",
        svg: Svg = None,
    ) -> None:
        _draw_plan(what, model, Draft(layout, keys=tuple(keys or ())), cluster, svg)

    command.__doc__ = words
    return command


_DRAWN: dict[Planned, str] = {
    "memory": "Draw what each pipeline stage holds, against the memory of a device.",
    "mesh": "Draw the ranks of a layout: nodes, axes, stages.",
    "traffic": "Draw what a rank sends in a step, by axis and link.",
}
for _what, _words in _DRAWN.items():
    draw_app.command(_what)(_drawer(_what, _words))


# -- measured --------------------------------------------------------------------------


def _predicted(planned: Plan) -> list[str]:
    """A line with the seconds of a step on this machine, if it was measured with as many ranks."""
    try:
        machine = cluster_named(HERE, devices=planned.layout.world)
        seconds = step_time(planned, machine, profile_for(machine, planned.method)).seconds
    except UserError:
        return []
    return [f"predicted   {seconds:.4f} s a step on this machine, by howdah measure"]


def trace(folder: Annotated[Path, typer.Argument(help="a run folder")]) -> None:
    """Show the last steps of a run as they were measured, beside the same actions simulated.

    The table comes first: a reader who may not write to the folder gets it, and then exit code 2.
    """
    if kind_of(folder) != "folder":
        raise UserError(
            f"{named(folder)} is no run folder; give the folder that howdah train has written"
        )
    run = load_run(folder)
    layout = resolve(parse_layout(run.layout), None)
    plan_of_run = plan_of(run, layout)
    if sync := run.method.sync:
        members = read_members(
            folder / TRACE, str(layout), workers=sync.workers, servers=layout.server
        )
        print("\n".join(served_trace.report(members, str(layout), sync.kind)))
        drawings = {"trace.json": served_trace.to_perfetto(members, plan_of_run)}
    else:
        traces = read_traces(folder / TRACE, str(layout), layout.workers)
        found = compare_step(plan_of_run, traces)
        lines = report(found, str(layout), algorithms=traces[0].algorithms)
        print("\n".join([*lines, *_predicted(plan_of_run)]))
        drawings = {"trace.json": to_perfetto(found), "trace.svg": to_svg(found)}
    for name, text in drawings.items():
        try:
            write_text(folder / TRACE / name, text)
        except OSError as error:
            raise UserError(
                f"cannot write {folder / TRACE / name} ({error.strerror or error}); copy the run "
                "folder to where there is room, and you may write, to have it drawn"
            ) from error
    more = ", trace.svg" * ("trace.svg" in drawings)
    print(f"written     {folder / TRACE}: trace.json for ui.perfetto.dev{more}")
