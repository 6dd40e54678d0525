"""The figures that the plan predicts before a run's first step, and the run's own measurements.

Weights, masters, gradients and moments are tensors, so their sizes are known exactly. What autograd
keeps between forward and backward is counted once, in a separate forward pass on the first
micro-batch. Resident memory is not compared, because it also holds the interpreter and caches.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

from howdah.base.errors import UserError
from howdah.host.facts import cpu_model
from howdah.machines.cluster_file import CLUSTERS, HERE, load_cluster
from howdah.parallel.apply import ParallelModel
from howdah.parallel.homes import Homes
from howdah.parallel.mesh import Mesh
from howdah.parallel.saved_bytes import SavedTensorMeter
from howdah.parallel.stages import Given
from howdah.parallel.unit_messages import Messages
from howdah.parallel.zero3 import ShardedWeights
from howdah.plan.homes import AXIS
from howdah.plan.layout import Home
from howdah.plan.plan import Plan
from howdah.plan.program import schedule_of
from howdah.plan.schedule.held import peak_held
from howdah.plan.trained import told
from howdah.sim.kernels import kernels_of
from howdah.sim.measured import read_measured
from howdah.sim.memory import memory, peak
from howdah.sim.step_time import step_time
from howdah.sim.timeline import simulate
from howdah.sim.traffic import step_traffic
from howdah.text.batches import Micro
from howdah.train.job import Job
from howdah.train.metrics import MIB
from howdah.train.step import StepContext, to_device

Bytes = Mapping[str, int]  # by component


def predict_lines(plan: Plan, mesh: Mesh, away: Homes | None) -> list[str]:
    """Lines with the predictions for this rank: its memory by component, the bytes that it sends in
    a step, what moves those of its homes on the disk, the pipeline bubble, and how many replicas
    have no sample.
    """
    held = predicted_memory(plan, mesh.rank)
    parts = ", ".join(f"{name} {count / MIB:.1f}" for name, count in held.items())
    rows = step_traffic(plan, mesh.rank, mesh.wires)
    moved = sum(count for row, count in rows.items() if row.axis == AXIS)
    homes = f", moves {moved / MIB:,.1f} MiB from and to homes" if moved else ""
    lines = [
        f"plan        {plan.layout}: {sum(held.values()) / MIB:,.1f} MiB a rank ({parts}); "
        f"sends {(sum(rows.values()) - moved) / MIB:,.1f} MiB a step{homes}"
    ]
    if away and away.disk_by:
        lines.append(f"disk        {away.disk_by}")
    if said := told(plan.shape, plan.method):
        lines.append(f"trained     {said}")
    if plan.comm.algorithm:
        lines.append(f"algorithms  {plan.comm.algorithm}")
    if plan.layout.pp > 1:
        lines.append(
            f"pipeline    {simulate(schedule_of(plan)).bubble:.0%} of all time is its bubble, if "
            "all stages take as long; more micro-batches (a larger x) shrink it"
        )
    idle = plan.layout.readers - (plan.batch.global_batch or 0)
    if idle > 0:
        lines.append(
            f"idle        {idle} of {plan.layout.readers} replicas have no sample in a batch of "
            f"{plan.batch.global_batch}; use a smaller dp, or a larger batch.global_batch"
        )
    return lines


def predicted_memory(plan: Plan, rank: int, *, packed: bool = True) -> Bytes:
    """The bytes of a rank by component, as the simulator predicts them; off the device, with the
    home behind the component's name.

    packed  whether some row of the micro-batch has several documents
    """
    rows: Counter[str] = Counter()
    for held in memory(plan, rank, replace(kernels_of(plan), packed=packed)):
        rows[_named(held.component, held.home)] += held.bytes
    return rows


def _named(component: str, home: Home) -> str:
    return component if home == "device" else f"{component} at {home}"


def measured_memory(context: StepContext, micro: Micro) -> Bytes:
    """The bytes of this rank by component, measured with one micro-batch on a model that has its
    optimizer state. All ranks call together, because a forward pass may communicate.

    Each of the rank's stages runs by itself, and the schedule determines which of their activations
    are held at the same time.
    """
    placed, given = context.placed, to_device(context, micro, step=0)
    with context.mesh.counters.aside():
        activations, away = _in_flight(placed, given)
    if placed.store:
        placed.store.clear()
    moved = {_named("activations", placed.plan.layout.activations): away} if away else {}
    return {**_tensors(placed), "activations": activations, **moved}


def _tensors(placed: ParallelModel) -> dict[str, int]:
    units, layout = placed.units.values(), placed.plan.layout
    moves = placed.update or placed.homes
    states = placed.homes.states if placed.homes else {}
    gatherer = placed.gatherer
    messages = gatherer.messages if isinstance(gatherer, ShardedWeights) else Messages()
    found = {
        _named("weights", layout.weights): sum(unit.weights.nbytes for unit in units),
        "gathered": sum(tensor.nbytes for tensor in placed.multiplied)
        - sum(unit.weights.nbytes for unit in units),
        "copies": sum(one.nbytes for one in messages.copies.values()),
        _named("masters", layout.optimizer): sum(u.masters.nbytes for u in units if u.apart),
        "reduced": placed.sums.window.memory.nbytes + placed.sums.narrow_bytes,
        _named("gradients", layout.gradients): sum(
            (u.summed if u.gradients is None else u.gradients).nbytes for u in units
        ),
        _named("moments", layout.optimizer): sum(
            value.nbytes
            for some in (*placed.optimizer.state.values(), *states.values())
            for value in some.values()
            if value.ndim  # a scalar is the number of updates
        ),
        _named("staged", "host"): moves.staged_bytes if moves else 0,
    }
    return {name: count for name, count in found.items() if count}


def _in_flight(placed: ParallelModel, given: Given) -> tuple[int, int]:
    """Bytes of activations on the device, and in their home if that is another."""
    plan, executor, shelf = placed.plan, placed.executor, placed.executor.shelf
    here, there = [0] * len(plan.stages.parts), [0] * len(plan.stages.parts)
    for stage in executor.parts:
        before = shelf.held if shelf else 0
        with SavedTensorMeter([*placed.model.parameters(), *placed.multiplied]) as kept:
            outputs = executor.alone(stage, given, placed.loss)
        here[stage] = kept.count(*outputs.values())
        if shelf:
            here[stage] += sum(shelf.shared.values())
            there[stage] = shelf.held - before
            shelf.shared.clear()
        del outputs  # before the next stage keeps more
    schedule, pp_index = schedule_of(plan), placed.mesh.index_of("pp")
    most = [peak_held(schedule, pp_index, sizes=sizes) for sizes in (here, there)]
    return most[0], most[1]


def predicted_seconds(job: Job) -> tuple[float, str]:
    """Seconds of a step as this machine was measured, and the day. Raises UserError, which says
    what to do, where that is not known.
    """
    if job.device != "cpu":
        raise UserError("only steps on CPUs are predicted by a measurement so far")
    world = job.layout.world
    cluster = load_cluster(f"{HERE}x{world}", own=job.cache / CLUSTERS)
    facts, profile = read_measured(Path(cluster.profile), job.method.precision)
    here = (cpu_model(), str(torch.__version__), job.threads)
    if (facts.cpu, facts.torch, facts.threads) != here:
        threads = f"{facts.threads} thread{'s' * (facts.threads > 1)}"
        raise UserError(
            f"howdah measure was run on {facts.cpu} with torch {facts.torch} and {threads} a rank; "
            "run it again here"
        )
    return step_time(job.plan, cluster, profile).seconds, facts.date


def predicted_time(job: Job) -> list[str]:
    """A line with the predicted seconds of a step, where they are known before the run."""
    try:
        seconds, day = predicted_seconds(job)
    except UserError:
        return []
    return [f"time        {seconds:.4g} s a step, as howdah measure of {day} predicts it"]


def compare_time(job: Job, paces: Sequence[float]) -> list[str]:
    """A line with the median of what a step took beside its prediction.

    paces  seconds of a step in each stretch of steps; empty: there were none
    """
    if not paces:
        return []
    took = median(paces)
    try:
        seconds, day = predicted_seconds(job)
    except UserError as why:
        return [f"time        {took:.4g} s a step; not predicted: {why}"]
    return [
        f"time        {took:.4g} s a step; howdah measure of {day} predicted {seconds:.4g}: "
        f"{took / seconds - 1:+.1%}"
    ]


def compare(plan: Plan, mesh: Mesh, measured: Bytes) -> list[str]:
    """A line with measured beside predicted bytes, component by component."""
    predicted = predicted_memory(plan, mesh.rank)
    parts = ", ".join(
        f"{name} {count / MIB:.1f} (predicted {predicted[name] / MIB:.1f})"
        for name, count in measured.items()
    )
    return [f"memory      MiB of rank {mesh.rank}: {parts}"]


def allocated(plan: Plan, rank: int, most: int) -> str:
    """A line with the most bytes that torch allocated on a rank's card, beside the plan's."""
    counted = peak(memory(plan, rank, kernels_of(plan)))
    apart = (most - counted) / counted
    return (
        f"memory      at most {most / MIB:,.1f} MiB of tensors on the card of rank {rank}; the "
        f"plan counts {counted / MIB:,.1f}: {apart:+.1%}"
    )
