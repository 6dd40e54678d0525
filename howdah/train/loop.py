"""The training loop: connects the mesh, finds the start of the run, applies the layout to a plain
model, takes batches, steps, saves and reports.
"""

from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import isfinite
from signal import SIGTERM

import torch

from howdah.base.errors import UserError, pasted
from howdah.base.processes import keep_freed_memory
from howdah.base.signals import Stopped, StopRequest, listen
from howdah.checkpoint.facts import Past, facts
from howdah.checkpoint.folders import step_folder
from howdah.checkpoint.load import open_checkpoint
from howdah.comm.both import explain_losses_in
from howdah.comm.transport import Transport
from howdah.host.devices import device_lines, own_device
from howdah.host.peak import Peak, peak_flops
from howdah.host.precision import precision_notes
from howdah.optim.learning_rate import learning_rate
from howdah.parallel.apply import ParallelModel, apply
from howdah.parallel.compile import compile_model
from howdah.parallel.flat_params import DTYPES
from howdah.parallel.mesh import Mesh, connect_mesh
from howdah.shapes.shape import stated
from howdah.text.labelled import labels_of
from howdah.text.prefetch import Prefetch
from howdah.text.tokenizer import extra_tokens
from howdah.text.tokens import Corpus, prepare
from howdah.train.apart import team_of
from howdah.train.callbacks import Callbacks, Moment
from howdah.train.checkpointing import Checkpointer
from howdah.train.console import RunConsole, Say, to_each
from howdah.train.feed import Fed, Supply
from howdah.train.finish import finish, how_to_finish, how_to_go_on
from howdah.train.job import Job
from howdah.train.length import describe
from howdah.train.metrics import MetricsWriter
from howdah.train.monitor import SpeedMonitor
from howdah.train.out_of_memory import out_of_memory
from howdah.train.profile import StepProfiler
from howdah.train.report import Bytes, measured_memory, predict_lines, predicted_time
from howdah.train.resume import Start, check_match, find_start, read_weights
from howdah.train.room import keeps_freed, ranks_here, snapshots_for
from howdah.train.run_folder import lock
from howdah.train.same_settings import require_same_settings
from howdah.train.same_text import require_same_text
from howdah.train.samples import first_samples, order_of_run, read_batches
from howdah.train.spikes import Spikes
from howdah.train.state import refill, restore_states
from howdah.train.step import StepContext, StepResult, counted, train_step
from howdah.train.tell import Untold, steps_late
from howdah.train.trackers import trackers

NOTHING: Bytes = {}  # measured by a run that takes no step


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    step    number of updates done
    signal  the signal that stopped the run early, or 0
    """

    step: int
    signal: int


@dataclass(frozen=True)
class Begun:
    """A run that is ready for its next step: the objects that the loop works with.

    start         the state that the run starts from
    first_sample  step → index of its first sample in the order of samples
    in_epoch      samples of an epoch
    tell          shows a line to the user and appends it to log.txt
    profiler      records one step, if the user has asked for it
    callbacks     functions of the user's own
    records       the files that grow; None on ranks other than 0
    stack         closes what was opened
    """

    context: StepContext
    start: Start
    first_sample: Callable[[int], int]
    in_epoch: int
    batches: Prefetch[Fed]
    monitor: SpeedMonitor
    checkpointer: Checkpointer
    tell: Say
    profiler: StepProfiler
    callbacks: Callbacks
    records: MetricsWriter | None
    stack: ExitStack

    def asked(self, request: StopRequest) -> bool:
        """Whether this rank was asked to stop, by a signal or a callback."""
        return request.signal != 0 or self.callbacks.why is not None


def train(job: Job, transport: Transport, *, local_rank: int = 0) -> Outcome:
    """Trains `job` on this rank, from the state of its run folder to its last step.

    A stop signal takes effect at once before the first step, and again when the last step is on
    disk. In between, all ranks stop after the same step and save it. Raises Stopped when the signal
    arrives before the first step, and Unfinished when the last step cannot be saved.
    """
    torch.set_num_threads(job.threads)
    with listen() as request, ExitStack() as stack:
        begun = begin(job, transport, stack, device_of(job, local_rank))
        request.patient = True
        begun, step, stopped, held = take_steps(job, begun, request)
        begun.checkpointer.stop(step, samples=begun.first_sample(step))
        if stopped and begun.callbacks:
            begun.callbacks.tell_others()
        if stopped and step < job.train.steps and not by_signal(begun, request):
            begun.tell(f"stopped by a callback; to train on: howdah train {pasted(job.folder)}")
            job = replace(job, train=replace(job.train, steps=step))
        elif stopped:
            begun.tell(how_to_go_on(job, step))
            return Outcome(step, request.signal or SIGTERM)
        try:
            request.hurry()
            finish(job, begun.checkpointer, begun.monitor, held)
        except Stopped as now:
            begun.tell(how_to_finish(job))
            return Outcome(step, now.number)
        return Outcome(step, 0)


def begin(job: Job, transport: Transport, stack: ExitStack, device: torch.device) -> Begun:
    """Begins a run: 1. connect ranks, and lock the run folder, 2. the text, 3. the start, and the
    layout applied to its weights, 4. what sees the steps: log, checkpoints, batches, speed, 5. the
    first lines. `stack` closes what this opens.
    """
    # 1
    mesh = stack.enter_context(connect_mesh(job.layout, transport, device, job.plan.comm.algorithm))
    keep_freed_memory(keeps_freed(job.plan, mesh))
    explain_losses_in(transport, job.folder)
    # Streams order what one thread launches; on a GPU, torch would run backward passes on another.
    stack.enter_context(torch.autograd.set_multithreading_enabled(device.type == "cpu"))
    stack.enter_context(out_of_memory(job, mesh, ranks_here(mesh)))
    if mesh.rank == 0:
        stack.enter_context(lock(job.folder))
    said: list[str] = []  # for log.txt, which is opened when it is known where the run starts
    say = to_each(RunConsole(mesh.rank).say, said.append)
    extra, labels = extra_tokens(job.shape), labels_of(job.shape)
    corpus = prepare(  # 2
        job.data, vocab=job.shape.vocab, cache=job.cache, say=say, extra=extra, labels=labels
    )
    require_same_text(mesh, corpus, job.data)
    require_same_settings(mesh, job)
    team = team_of(job, mesh, stack, say)
    start = find_start(job, mesh, say, team)  # 3
    peak = peak_of(job, mesh, say)
    placed = place(job, mesh, start, corpus)
    console = RunConsole(mesh.rank, steps=job.train.steps, done=start.step)  # 4
    stack.enter_context(closing(console))
    records = records_of(job, start, console.say) if mesh.rank == 0 else None
    snapshots, spikes = snapshots_for(job.plan, mesh), spikes_of(job, start, device)
    context = StepContext(
        placed, mesh, job.method, job.seed, snapshots=snapshots, spikes=spikes, ahead=start.ahead
    )
    tell: Say = console.say
    if records:
        stack.callback(records.close)
        tell = to_each(console.say, records.log)
        for line in said:
            records.log(line)
    checkpointer = Checkpointer(job, context, corpus, start, records=records, say=tell)
    stack.enter_context(checkpointer)
    first, order = first_samples(job, start), order_of_run(job, corpus)
    batches = stack.enter_context(closing(read_batches(job, mesh, corpus, start, first)))
    monitor = SpeedMonitor(job, context, batches, peak=peak, console=console, records=records)
    length = describe(order, steps=job.train.steps, used=first(job.train.steps))  # 5
    notes = precision_notes(job.method.precision, device.type)
    of_device = [*device_lines(device, ranks_here(mesh)), *(f"device      {n}" for n in notes)]
    predicted = predict_lines(job.plan, mesh, placed.homes)
    for line in [*of_device, *predicted, *predicted_time(job), length]:
        tell(line)
    if start.step >= job.train.steps:
        tell(f"all {job.train.steps:,} steps are done; to train on, raise train.steps")
    in_epoch = sum(order.samples)
    profiler = profiler_of(job, mesh, tell)
    if 0 < job.train.profile <= start.step < job.train.steps:
        tell(f"profile     step {job.train.profile} is done: this start records none")
    return Begun(
        context=context,
        start=start,
        first_sample=first,
        in_epoch=in_epoch,
        batches=batches,
        monitor=monitor,
        checkpointer=checkpointer,
        tell=tell,
        profiler=profiler,
        callbacks=Callbacks(job.train.callbacks, placed, records, tell),
        records=records,
        stack=stack,
    )


def records_of(job: Job, start: Start, say: Say) -> MetricsWriter:
    """The files of the run folder that grow, and its trackers."""
    about = {"name": job.name, "layout": str(job.layout), "seed": job.seed}
    parts = {"model": asdict(stated(job.shape)), "batch": asdict(job.batch)}
    parts["method"] = asdict(job.method)
    keys = {f"{part}.{key}": x for part, one in parts.items() for key, x in one.items()}
    names, folder = job.train.tracker, job.folder
    tracked = trackers(names, folder, run=job.name, step=start.step, keys={**about, **keys})
    return MetricsWriter(folder, step=start.step, say=say, trackers=tracked)


def spikes_of(job: Job, start: Start, device: torch.device) -> Spikes | None:
    """What watches the losses of a run; None if nobody asked for that."""
    if job.method.spike is None:
        return None
    past = facts(start.checkpoint).spikes if start.checkpoint else None
    return Spikes(job.method.spike, device, past)


def by_signal(begun: Begun, request: StopRequest) -> bool:
    """Whether a signal has stopped the run, on some rank. All ranks call together."""
    mesh = begun.context.mesh
    with mesh.counters.aside():
        (signals,) = mesh.world.sum_scalars([float(request.signal != 0)])
    return signals > 0


def take_steps(job: Job, begun: Begun, request: StopRequest) -> tuple[Begun, int, bool, Bytes]:
    """Trains until the last step, or until some rank was asked to stop. Returns the run as it is
    then (it may have gone back to a checkpoint), the number of updates done, whether the run was
    stopped, and the bytes that this rank was measured to hold.

    On a GPU the loop runs ahead of what is reported (`tell.py`).
    """
    context, first = begun.context, begun.start.step
    step, stopped, held = first, False, NOTHING
    batches = supply_of(job, begun, request, step)
    untold = Untold(steps_late(context.mesh.device))
    while step < job.train.steps and not stopped:
        rate = learning_rate(job.method.lr, step=step, steps=job.train.steps)
        asked, batch = begun.asked(request), batches.next()
        if held is NOTHING:
            held = measured_memory(context, batch[0])
        with begun.profiler.around(step + 1):
            result = train_step(context, batch, step=step, rate=rate, stop=asked)
        step, stopped = step + 1, result.stop
        sent = begun.monitor.sent
        untold.add(partial(report, begun, result, step=step, rate=rate, sent=sent))
        due = not stopped and begun.checkpointer.is_due(step)
        if due or stopped:
            untold.settle()
        if context.spikes and context.spikes.goes_back:
            untold.settle()
            with begun.monitor.paused():
                begun, step = go_back(job, begun, step)
            batches = supply_of(job, begun, request, step)
        elif due:
            with begun.monitor.paused():
                begun.checkpointer.between(step, samples=begun.first_sample(step))
    untold.settle()
    return begun, step, stopped, held


def supply_of(job: Job, begun: Begun, request: StopRequest, step: int) -> Supply:
    """The batches from `step` on."""
    return Supply(
        begun.batches,
        begun.context.mesh,
        steps=job.train.steps - step,
        labels=partial(counted, begun.context),
        asked=lambda: begun.asked(request),
    )


def go_back(job: Job, begun: Begun, step: int) -> tuple[Begun, int]:
    """Goes back to the newest checkpoint, and on with the samples behind those used so far. Without
    a checkpoint, or after too many returns to one, the run goes on as it is. All ranks call
    together. Returns the run, and the number of updates done.
    """
    context, checkpointer = begun.context, begun.checkpointer
    placed, spikes = context.placed, context.spikes
    assert spikes is not None
    to = -1 if checkpointer.team.board else checkpointer.settled()
    if not spikes.may_go_back(to):
        there = "no checkpoint is there for all ranks" if to < 0 else f"step {to} was tried before"
        begun.tell(f"spike       the run goes on from step {step}: {there}")
        return begun, step
    used = begun.first_sample(step)
    checkpoint = open_checkpoint(step_folder(checkpointer.folder, to))
    fill = read_weights(checkpoint, begun.checkpointer.job)
    start = Start(fill, checkpoint, to, used, begun.start.team)
    placed.sync_weights()  # what the last step has begun to send is part of it
    with context.mesh.counters.aside():
        refill(placed, start.fill)
        restore_states(placed, checkpoint)
        placed.sync_weights()
    spikes.back(facts(checkpoint).spikes or Past())
    begun.tell(f"spike       back to step {to}, and on with the samples behind step {step}")
    if begun.records:
        begun.records.back_to(to)
    begun.batches.close()
    first = first_samples(job, start)
    corpus, stack = checkpointer.corpus, begun.stack
    batches = stack.enter_context(closing(read_batches(job, context.mesh, corpus, start, first)))
    begun.monitor.read_from(batches)
    return replace(begun, start=start, first_sample=first, batches=batches), to


def report(begun: Begun, result: StepResult, *, step: int, rate: float, sent: int) -> None:
    """Reports a step, counted from 1, when its numbers may be read."""
    refuse_divergence(result, step)
    epoch = begun.first_sample(step) / begun.in_epoch
    context, callbacks = begun.context, begun.callbacks
    if context.spikes and (told := context.spikes.tell(step, result.loss, result.spike)):
        begun.tell(told)
    begun.checkpointer.routed.add(result.expert_tokens)
    ends = result.stop and bool(callbacks)
    begun.monitor.step(result, step=step, rate=rate, epoch=epoch, sent=sent, last=ends)
    if callbacks:
        callbacks.call(
            Moment(
                step=step,
                steps=begun.checkpointer.job.train.steps,
                loss=result.loss,
                norm=result.norm,
                rate=rate,
                tokens=result.tokens,
                epoch=epoch,
                held_out=begun.checkpointer.latest,
                rank=context.mesh.rank,
                world=context.mesh.world.size,
                model=context.placed,
            )
        )


def profiler_of(job: Job, mesh: Mesh, tell: Say) -> StepProfiler:
    """Records the step of `train.profile` on this rank."""
    return StepProfiler(
        job.train.profile, rank=mesh.rank, device=mesh.device, folder=job.folder, say=tell
    )


def device_of(job: Job, local_rank: int) -> torch.device:
    """The device of this rank, made the current one."""
    return own_device(job.device, local_rank)


def peak_of(job: Job, mesh: Mesh, say: Say) -> Peak:
    """The peak flop/s of rank 0's device, by which all ranks divide."""
    found = Peak(0.0, "of rank 0")
    if mesh.rank == 0:
        dtype = DTYPES[job.method.precision]
        found = peak_flops(mesh.device, dtype, threads=job.threads, cache=job.cache, say=say)
    (flops,) = mesh.world.sum_scalars([found.flops])
    return found._replace(flops=flops)


def refuse_divergence(result: StepResult, step: int) -> None:
    """Raises UserError when loss or gradient norm is not finite; such a step is not saved."""
    if not isfinite(result.norm + result.loss):
        raise UserError(
            f"training diverged: the gradient norm of step {step} is {result.norm}; go on from "
            "the last checkpoint with a lower method.lr.peak or a longer method.lr.warmup_steps"
        )


def place(job: Job, mesh: Mesh, start: Start, corpus: Corpus) -> ParallelModel:
    """The model laid out for this rank, with weights and optimizer states filled from `start`."""
    if start.checkpoint:
        check_match(start.checkpoint, job, corpus, reads_base=mesh.rank == 0)
    placed = apply(job.plan, mesh=mesh, fill=start.fill, orders=start.orders)
    if start.checkpoint:
        restore_states(placed, start.checkpoint)
    if job.compile:
        compile_model(placed.model, whole=placed.store is None)
    return placed
