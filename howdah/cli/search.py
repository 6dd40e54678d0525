"""`howdah plan` without a layout: searches for one."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast, get_args

from howdah.base.errors import UserError, named, pasted, shown
from howdah.cli.auto import cluster_of, machine_for
from howdah.cli.environment import cluster_named
from howdah.config.auto import is_auto, nothing, question_of, with_plan
from howdah.config.drafts import Draft, run_of
from howdah.config.new_recipe import usual_rate
from howdah.config.recipe import Run
from howdah.config.save import save_run
from howdah.config.shipped import is_recipe, which
from howdah.draw.found import found_data, show_choices, show_found
from howdah.draw.found_svg import plot_devices
from howdah.draw.pictures import put, require_place, require_svg
from howdah.draw.tables import short_count, show_model, show_notes
from howdah.machines.cluster import Cluster
from howdah.plan.layout import Home
from howdah.plan.method import LearningRate, Precision
from howdah.plan.support import unsupported
from howdah.search.budget import Priced, affordable, parse_budget, priced, within
from howdah.search.scaling import fewest, in_each, largest, largest_preset
from howdah.search.search import Choice, Found, Watch, on_each, pareto, search, sizes
from howdah.search.space import Question
from howdah.search.uneven import uneven
from howdah.shapes.parameters import parameters
from howdah.sim.cost import Rates, hourly
from howdah.sim.measured import profile_for
from howdah.sim.profile import Profile
from howdah.text.sources import Data
from howdah.train.length import in_steps

SAVED = 1800.0  # seconds between the checkpoints of a recipe that is written


@dataclass(frozen=True)
class Asked:
    """The options of a search.

    tokens   of the whole run; 0: no costs
    rent     USD per device and hour; None: the cluster's
    devices  "64..4096": the fastest layouts on so many
    fewest   the fewest devices
    largest  the largest model that fits
    planned  also layouts that can only be planned
    precisions  in which steps may be computed, the usual one first
    write    file of the recipe with the best layout
    plot     file of the drawing of times over devices
    """

    cluster: str
    tokens: int = 0
    rent: float | None = None
    budget: str = ""
    devices: str = ""
    fewest: bool = False
    largest: bool = False
    planned: bool = False
    write: Path | None = None
    plot: Path | None = None
    profile: Profile | None = None
    as_json: bool = False
    precisions: tuple[Precision, ...] = ()


@dataclass(frozen=True)
class _Answer:
    """What is printed.

    found  on one number of devices
    table  the fastest on each of several; empty: one number was asked for
    rows   the layouts of the table, or else of `found`, with their costs; None: no costs
    notes  lines above the table
    """

    found: Found
    table: Sequence[Choice] = ()
    rows: Sequence[Priced] | None = None
    notes: Sequence[str] = ()

    @property
    def best(self) -> Choice:
        some = [row.choice for row in self.rows] if self.rows else self.table or self.found.best
        return min(some, key=lambda one: one.seconds)


def is_search(model: str, wanted: Draft, cluster: str) -> bool:
    """Whether nobody has said a layout: neither an option, a key nor a recipe; or it is auto."""
    keyed = [key.partition("=")[2].strip("'\" ") for key in wanted.keys if key[:7] == "layout="]
    if said := [wanted.layout, *keyed][-1]:
        return said == "auto"
    if is_recipe(model):
        return is_auto(run_of(model, wanted)[1])
    return bool(cluster)


def find(model: str, wanted: Draft, asked: Asked) -> None:
    """Searches, prints the answer, and writes a recipe if that is asked."""
    keys = tuple(key for key in wanted.keys if key.partition("=")[0] != "layout")
    first, *others = wanted.precision.split(",")
    wanted = replace(wanted, layout="", keys=keys, precision=first)
    name, run, notes = run_of(model, wanted)
    asked = replace(asked, precisions=(run.method.precision, *map(_precision, others)))
    _check(asked)
    cluster, more = _cluster(run, asked)
    given = wanted.micro_batch is not None or any("micro_batch" in key for key in wanted.keys)
    kept = run.batch.micro_batch if given or (is_recipe(model) and is_auto(run)) else None
    question = question_of(run, cluster, micro_batch=kept, planned=asked.planned)
    answer = _answer(question, asked, name)
    best = answer.best.plan
    run = replace(run, method=best.method)
    if asked.write:
        more = [*more, *_write(run, answer.best, asked)]
    if asked.plot:
        title = f"{name} on {cluster.device.name}"
        put(plot_devices(answer.table, title), asked.plot, told=False)
    here = unsupported(best.shape, best.layout, precision=run.method.precision)
    profile = asked.profile or profile_for(cluster, run.method)
    by_time = uneven(answer.found.question, answer.best, profile) if not answer.table else ()
    _print(name, model, asked, answer, [*notes, *more, *here, *by_time])


def _check(asked: Asked) -> None:
    """Raises UserError for options that do not go together, before anything is searched."""
    if asked.budget and not asked.tokens:
        raise UserError("--budget is of a whole run; say how long it is, with --tokens")
    if asked.write and asked.write.exists():
        raise UserError(f"{named(asked.write)} is there already; give --write another name")
    require_place(asked.write)
    require_svg(asked.plot)
    questions = [("--fewest", asked.fewest), ("--largest", asked.largest)]
    questions += [("--devices", bool(asked.devices)), ("--plot", asked.plot is not None)]
    several = [option for option, given in questions if given]
    if len(asked.precisions) > 1 and several:
        raise UserError(f"{several[0]} is asked in one precision; name one with --precision")
    if len(several) > 1 and several != ["--devices", "--plot"]:
        raise UserError(f"{' and '.join(several)} are questions of their own; ask one of them")


def _precision(text: str) -> Precision:
    """A further precision. Raises UserError where there is none of the name."""
    known = get_args(Precision)
    if text not in known:
        raise UserError(f"--precision {shown(text)} is none of {', '.join(known)}")
    return cast(Precision, text)


def _cluster(run: Run, asked: Asked) -> tuple[Cluster, list[str]]:
    """The cluster that is asked for, or that of the recipe, or this machine; and notes on it."""
    if asked.cluster:
        return cluster_named(asked.cluster), []
    cluster, note = cluster_of(run, machine_for(run))
    return cluster, [note] if note else []


def _answer(question: Question, asked: Asked, name: str) -> _Answer:
    """The answer. Raises UserError if there is none, or none within the budget."""
    budget = parse_budget(asked.budget) if asked.budget else {}
    rates, watch = hourly(question.cluster, rent=asked.rent), _watched
    notes: list[str] = []
    if asked.largest:
        question, notes = _largest(question, name, watch)
    table: Sequence[Choice] = ()
    found: Found | None
    if asked.devices or asked.plot:
        found, table = _on_several(question, asked, watch)
    elif asked.fewest:
        found = _fewest(question, asked, budget, rates)
    elif len(asked.precisions) > 1:
        found, notes = in_each(question, asked.precisions, asked.profile, watch)
    else:
        found = search(question, asked.profile, watch=watch)
    if found is None or not found.best:
        raise UserError(nothing(found or search(question, asked.profile, refined=1), name))
    if not asked.tokens:
        return _Answer(found, table, None, notes)
    rows = [*priced(table or found.best, asked.tokens, rates)]
    if budget:
        rows = within(budget, rows)
        chosen = tuple(row.choice for row in rows)
        table, found = (chosen, found) if table else ((), replace(found, best=chosen))
    return _Answer(found, table, rows, notes)


def _on_several(question: Question, asked: Asked, watch: Watch) -> tuple[Found, Sequence[Choice]]:
    """The answer on the most devices on which anything fits, and the fastest on each number."""
    least, most = _range(asked.devices) if asked.devices else (1, question.devices)
    counts = sizes(question.cluster, least, most)
    if not counts:
        node = question.cluster.devices_per_node
        raise UserError(
            f"cluster {question.cluster.name} has no size from {least} to {most}; its nodes have "
            f"{node} devices: give --devices a range with a multiple of {node}"
        )
    every = [*on_each(question, counts, asked.profile, watch)]
    fitting = [one for one in every if one.best] or every
    return fitting[-1], pareto(fitting)


def _fewest(
    question: Question, asked: Asked, budget: dict[str, float], rates: Rates
) -> Found | None:
    def meets(found: Found) -> bool:
        return affordable(budget, [*priced(found.best, asked.tokens, rates)])

    only = meets if budget else None
    found = fewest(question, asked.profile, meets=only, watch=_watched)
    return found or search(question, asked.profile)  # whose nearest layout is named


def _largest(question: Question, name: str, watch: Watch) -> tuple[Question, list[str]]:
    """The question of the largest model of a kind in the memory of the devices, else with states
    off them; and lines on it, on the largest preset, and on those with states on the host.
    """
    tiers: list[tuple[str, tuple[Home, ...]]] = [("", ())]
    if question.planned or question.cluster.device.cuda_names:  # the host of a CPU is the device
        tiers.append((" with states on the host", ("host",)))
    first, lines = None, list[str]()
    for number in watch(range(2 * len(tiers))):
        where, away = tiers[number // 2]
        asked = replace(question, away=away)
        if number % 2:
            if preset := largest_preset(asked):
                size = short_count(parameters(preset[1]).total)
                lines.append(f"largest preset{where}: {preset[0]}, {size} parameters")
        elif other := largest(asked):
            first = first or other
            lines.append(f"largest of its kind{where}: {_grown(question, other, name)}")
    if first is None and (first := largest(question)):
        lines.append(
            f"largest of its kind with states on the disk: {_grown(question, first, name)}"
        )
    if first is None:
        raise UserError(nothing(search(question, refined=1), name))
    return first, lines


def _grown(question: Question, other: Question, name: str) -> str:
    """The size of a model that has grown, and the settings that make it."""
    keys = ("layers", "width", "ffn_size", "heads", "kv_heads")
    changed = [
        f"model.{key}={now}"
        for key in keys
        if (now := getattr(other.shape, key)) != getattr(question.shape, key)
    ]
    size = short_count(parameters(other.shape).total)
    return f"{size} parameters, {name} {' '.join(changed)}".rstrip()


def _range(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,7})(?:\.\.(\d{1,7}))?", text)
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 0 < least <= most:
        raise UserError(f"--devices {shown(text)} is no range; write it like 64..4096")
    return least, most


def _watched(numbers: Sequence[int]) -> Iterator[int]:
    """The numbers; a terminal sees a bar."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    quiet = not console.is_terminal
    yield from track(numbers, "searching", console=console, disable=quiet, transient=True)


def _write(run: Run, best: Choice, asked: Asked) -> list[str]:
    """Writes the run with the best layout, and its length where that is known, as a recipe; with
    checkpoints where it has none. Returns what its user should look at.
    """
    assert asked.write is not None
    train, plan, notes = run.train, best.plan, list[str]()
    if asked.tokens:
        train = replace(train, tokens=asked.tokens, epochs=0.0)
    if train.tokens:
        train = in_steps(train, plan.batch, plan.sequence)
    every = max(round(SAVED / best.seconds), 1)
    if not train.save_every and (train.steps or 0) > every:
        train = replace(train, save_every=every)
        notes.append(f"{asked.write} saves every {every:,} steps, some half an hour")
    method = run.method
    if method.lr == LearningRate() and run.init_from is None:
        peak, warm_up = usual_rate(plan.shape, tuned=False), min((train.steps or 0) // 50, 2000)
        rate = LearningRate(peak, warmup_steps=warm_up, schedule="cosine", min_ratio=0.1)
        method = replace(method, lr=rate)
        notes.append(f"method.lr.peak is {peak:g}, as GPT-3's models of this size had it")
    if run.data.sources == Data().sources:
        notes.append(
            f"{asked.write} trains on the library of Python (stdlib); name your own text as "
            "data.sources"
        )
    save_run(
        replace(
            with_plan(run, plan),
            model=plan.shape,
            name=asked.write.stem,
            train=train,
            method=method,
            cluster=asked.cluster or run.cluster,
        ),
        asked.write,
        brief=True,
    )
    return notes


def _print(name: str, model: str, asked: Asked, answer: _Answer, notes: Sequence[str]) -> None:
    found, table, rows = answer.found, answer.table, answer.rows
    if rows and "money" not in rows[0].takes():
        notes = [*notes, "no price of these devices is known; --rent says USD for an hour of one"]
    if asked.as_json:
        data = found_data(found, None if table else rows)
        if table:
            data["by_devices"] = found_data(replace(found, best=tuple(table)), rows)["best"]
        print(json.dumps({**data, "notes": [*answer.notes, *notes]}, indent=2))
        return
    shape, sequence = found.question.shape, found.question.sequence
    lines = [told] if (told := which(model, models=True)) else []
    called = f"{name}, as large as fits" if asked.largest else name
    lines += [*show_model(called, shape, sequence), *answer.notes]
    if table:
        lines += [
            "devices the least predicted time on each number of devices, where more devices "
            "lower it"
        ]
        lines += show_choices(table, rows)
    else:
        lines += show_found(found, rows)
    if asked.plot:
        lines.append(f"drawn   {asked.plot}: seconds of a step over devices")
    if asked.write:
        lines.append(f"written {asked.write}: howdah train {pasted(asked.write)}")
    print("\n".join([*lines, *show_notes(notes)]))
