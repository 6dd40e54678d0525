"""`layout = "auto"`: the layout that a search finds takes its place before a run starts.

    1. the run folder    a layout that the run has begun with wins, if there are as many processes
    2. the cluster       that the recipe names, or this machine (`cli/auto.py`)
    3. the search        of layouts that can be run, on all devices

What was found is a recipe like any other: it has a layout, a global batch and a micro-batch.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from howdah.base.atomic import write_text
from howdah.base.errors import UserError, several
from howdah.config.recipe import AUTO, Run, folder_of, load_run
from howdah.draw.found import show_found
from howdah.machines.cluster import Cluster
from howdah.plan.batch import resolve_batch
from howdah.plan.layout import Layout, parse_layout
from howdah.plan.plan import Plan
from howdah.search.layer_window import has_window
from howdah.search.notes import usual_batch
from howdah.search.search import Found, Refuse, search
from howdah.search.space import Question
from howdah.train.metrics import append
from howdah.train.run_folder import LAYOUT, LOG


class Settled(NamedTuple):
    """A run whose layout is known, a line that says where it is from, and the lines that say why;
    none for a layout that the run had before.
    """

    run: Run
    told: str
    why: Sequence[str] = ()


def is_auto(run: Run) -> bool:
    """Whether the layout of a run is searched for."""
    return run.layout.strip() == AUTO


def question_of(
    run: Run, cluster: Cluster, *, micro_batch: int | None, planned: bool = False
) -> Question:
    """The question for the layout of a run on a cluster. The global batch is that of the run; if
    it has none, that of published runs of such models.
    """
    if run.method.train or run.method.adapter:
        key = "method.adapter" if run.method.adapter else "method.train"
        raise UserError(
            f"a search prices layouts on which all weights are trained, and not yet {key}; name a "
            'layout, such as layout="dp2 zero3", which howdah plan prices'
        )
    sequence = run.data.sequence_length
    size = _batch_of(run)
    if size is None:
        size = usual_batch(run.model, sequence)
    sizes = sequence, size, micro_batch
    return Question(run.model, cluster, run.method, *sizes, planned, run.comm)


def _batch_of(run: Run) -> int | None:
    """The global batch of a run, given or as its layout makes it; None if it is open."""
    if run.batch.global_batch is not None or is_auto(run):
        return run.batch.global_batch
    layout = parse_layout(run.layout)
    if layout.dp is None or layout.micros is None or run.batch.micro_batch is None:
        return None
    return resolve_batch(run.batch, layout)[0].global_batch


def with_plan(run: Run, plan: Plan) -> Run:
    """The run on the layout of a plan, with its batch and its window of weights. A schedule of the
    user's own belongs to another layout.
    """
    size, storage = plan.batch.global_batch, run.storage
    batch = replace(run.batch, global_batch=size, micro_batch=plan.micro_batch)
    if has_window(plan.layout):
        storage = replace(storage, window=plan.storage.window)
    return replace(run, layout=str(plan.layout), batch=batch, storage=storage, schedule=None)


def settle(run: Run, cluster: Cluster, *, refuse: Refuse, note: str = "") -> Settled:
    """The run on the fastest layout of a cluster. Raises UserError if none can be.

    refuse  rules out a layout by its plan
    note    on the cluster, for the record
    """
    question = question_of(run, cluster, micro_batch=run.batch.micro_batch)
    found = search(question, refuse=refuse)
    if not found.best:
        raise UserError(f"layout=auto: {nothing(found, run.name)}")
    best = found.best[0].plan
    where = f"{question.devices:,} x {cluster.device.name} ({cluster.name})"
    told = f"{best.layout}, {_first_of(found)} on {where}"
    why = [*show_found(found, None), *([f"note    {note}"] if note else [])]
    return Settled(with_plan(run, best), told, why)


def _first_of(found: Found) -> str:
    """What is claimed of the first layout: no more than the error of the prediction allows."""
    alike, compared = found.alike, f"{found.compared:,}"
    if alike > 1:  # within the error
        return f"one of the {alike} fastest of {compared}"
    return f"fastest of {compared}" if alike else f"first of {compared}"


def nothing(found: Found, model: str) -> str:
    """That nothing fits, why, and what to do."""
    out = found.ruled_out.most_common()
    why = several([f"{count:,} layouts: {reason}" for reason, count in out]) or "no layout"
    question = found.question
    more = "take more devices, or a smaller batch or model"
    name = f"{question.devices:,} x {question.cluster.device.name}"
    return f"no layout of {model} fits on {name} ({why}); {more}"


def settled_before(run: Run, world: int | None) -> Settled | None:
    """The run on the layout that its folder has; None if it has none for `world` processes.

    world  processes that a launcher has started; None: the layout decides
    """
    folder = folder_of(run)
    try:
        before = load_run(folder)
        layout = parse_layout(before.layout)
    except UserError:
        return None
    if world not in (None, layout.world):
        return None
    return Settled(_on(run, before, layout), f"{layout}, with which {folder} has begun")


def _on(run: Run, before: Run, layout: Layout) -> Run:
    """The run on the layout of an earlier one; with another global batch it has other x."""
    old, size = before.batch, run.batch.global_batch
    if has_window(layout):
        run = replace(run, storage=replace(run.storage, window=before.storage.window))
    if size not in (None, old.global_batch):
        batch = replace(run.batch, micro_batch=run.batch.micro_batch or old.micro_batch)
        return replace(run, layout=str(replace(layout, micros=None)), batch=batch)
    micro = run.batch.micro_batch or old.micro_batch
    batch = replace(run.batch, global_batch=old.global_batch, micro_batch=micro)
    return replace(run, layout=before.layout, batch=batch)


def keep_why(settled: Settled, folder: Path, line: str) -> None:
    """Writes why a layout was chosen into the run folder, and `line` into its log."""
    if settled.why:
        text = "\n".join([f"layout  {settled.told}", *settled.why])
        write_text(folder / LAYOUT, f"{text}\n")
    append(folder / LOG, line)
