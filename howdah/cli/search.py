"""`howdah plan` without a layout: searches for one."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from howdah.base.errors import UserError, named, several, shown
from howdah.config.drafts import Draft, run_of
from howdah.config.recipe import Run, save_run
from howdah.config.shipped import is_recipe, which
from howdah.draw.found import found_data, show_choices, show_found
from howdah.draw.tables import show_model, show_notes
from howdah.machines.cluster import resized
from howdah.machines.cluster_file import load_cluster
from howdah.plan.support import unsupported
from howdah.search.budget import Priced, parse_budget, priced, within
from howdah.search.notes import usual_batch
from howdah.search.search import Choice, Found, on_each, pareto, search, sizes
from howdah.search.space import Question
from howdah.sim.cost import hourly
from howdah.sim.profile import Profile


@dataclass(frozen=True)
class Asked:
    """The options of a search.

    tokens   of the whole run; 0: no costs
    rent     USD per device and hour; None: the cluster's
    devices  "64..4096": the fastest layouts on so many
    fewest   the fewest devices
    planned  also layouts that can only be planned
    write    file of the recipe with the best layout
    """

    cluster: str
    tokens: int = 0
    rent: float | None = None
    budget: str = ""
    devices: str = ""
    fewest: bool = False
    planned: bool = False
    write: Path | None = None
    profile: Profile | None = None
    as_json: bool = False


def is_search(model: str, wanted: Draft, cluster: str) -> bool:
    """Whether nobody has said a layout: neither an option, a key nor a recipe."""
    keyed = any(key.partition("=")[0] == "layout" for key in wanted.keys)
    return bool(cluster) and not (wanted.layout or keyed or is_recipe(model))


def find(model: str, wanted: Draft, asked: Asked) -> None:
    """Searches, prints the answer, and writes a recipe if that is asked."""
    budget = parse_budget(asked.budget) if asked.budget else {}
    if budget and not asked.tokens:
        raise UserError("--budget is of a whole run; say how long it is, with --tokens")
    if asked.write and asked.write.exists():
        raise UserError(f"{named(asked.write)} is there already; give --write another name")
    if asked.fewest and asked.devices:
        raise UserError("--fewest and --devices are two questions; ask one of them")
    name, run, notes = run_of(model, replace(wanted, layout=""))
    question = _question(run, wanted, asked)
    found, table = _found(question, asked)
    if not found or not found.best:
        raise UserError(_nothing(name, asked, found))
    rates = hourly(question.cluster, rent=asked.rent)
    rows = [*priced(table or found.best, asked.tokens, rates)] if asked.tokens else None
    rows = within(budget, rows) if budget and rows else rows
    best = min((row.choice for row in rows), key=_seconds) if rows else found.best[0]
    if asked.write:
        _write(run, best, asked.write)
    here = unsupported(best.plan.shape, best.plan.layout, precision=run.method.precision)
    _print(name, model, asked, (found, table, rows), [*notes, *here])


def _seconds(choice: Choice) -> float:
    return choice.seconds


def _question(run: Run, wanted: Draft, asked: Asked) -> Question:
    """The question that a run, options and cluster ask. The batch stays fixed: layouts are compared
    for the same work.
    """
    sequence, batch = run.data.sequence_length, run.batch
    given = wanted.micro_batch is not None or any("micro_batch" in key for key in wanted.keys)
    size = batch.global_batch or usual_batch(run.model, sequence)
    return Question(
        run.model,
        load_cluster(asked.cluster),
        run.method,
        sequence,
        size,
        batch.micro_batch if given else None,
        asked.planned,
    )


def _found(question: Question, asked: Asked) -> tuple[Found | None, list[Choice]]:
    """The answer; and the rows of the table, where it is one of numbers of devices."""
    if not asked.devices and not asked.fewest:
        return search(question, asked.profile, watch=_watched), []
    least, most = _range(asked.devices) if asked.devices else (1, question.devices)
    counts = sizes(question.cluster, least, most)
    if not counts:
        name = question.cluster.name
        raise UserError(f"cluster {name} has no size from {least} to {most}; give --devices others")
    if asked.fewest:
        found = None
        for found in on_each(question, counts, asked.profile, _watched):
            if found.best:
                other = replace(question, cluster=resized(question.cluster, found.question.devices))
                return search(other, asked.profile), []
        return found, []
    all_ = [*on_each(question, counts, asked.profile, _watched)]
    fitting = [one for one in all_ if one.best] or all_
    return fitting[-1], pareto(fitting)


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


def _nothing(name: str, asked: Asked, found: Found | None) -> str:
    out = found.ruled_out.most_common() if found else []
    why = several([f"{count:,} layouts: {reason}" for reason, count in out]) if out else "too large"
    more = "; name a cluster of more devices, such as h100x1024"
    return f"no layout of {name} fits on {asked.cluster} ({why}){more}"


def _write(run: Run, best: Choice, file: Path) -> None:
    """Writes the run with the best layout as a recipe."""
    batch = replace(
        run.batch, global_batch=best.plan.batch.global_batch, micro_batch=best.plan.micro_batch
    )
    layout = str(best.plan.layout)
    save_run(replace(run, model=best.plan.shape, layout=layout, batch=batch), file)


def _print(
    name: str,
    model: str,
    asked: Asked,
    answer: tuple[Found, list[Choice], list[Priced] | None],
    notes: Sequence[str],
) -> None:
    found, table, rows = answer
    if asked.as_json:
        data = found_data(found, rows)
        if table:
            data["by_devices"] = found_data(replace(found, best=tuple(table)), rows)["best"]
        print(json.dumps({**data, "notes": [*notes]}, indent=2))
        return
    shape, sequence = found.question.shape, found.question.sequence
    lines = [told] if (told := which(model, models=True)) else []
    lines += show_model(name, shape, sequence)
    if table:
        choices = [row.choice for row in rows] if rows else table
        lines += ["devices the fastest on each number of devices, where more are faster"]
        lines += show_choices(choices, rows)
    else:
        lines += show_found(found, rows)
    if asked.write:
        lines.append(f"written {asked.write}: howdah train {asked.write}")
    print("\n".join([*lines, *show_notes(notes)]))
