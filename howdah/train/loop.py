"""Training, as one sentence: connect the mesh, find where to begin, apply the layout to a plain
model, take batches, step, save, report.
"""

import signal
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from itertools import accumulate
from math import isfinite

import torch

from howdah.comm.transport import Transport
from howdah.optim.rates import learning_rate
from howdah.parallel.apply import DTYPES, Placed, apply
from howdah.parallel.mesh import Mesh, connect_mesh
from howdah.plan.problems import BadInput
from howdah.text.batches import Micro, Rows, micros, order_of
from howdah.text.prefetch import Prefetch
from howdah.text.tokens import Corpus, prepare
from howdah.train.finish import finish, how_to_go_on
from howdah.train.folder import hold
from howdah.train.foresee import Bytes, foretell, measured_memory
from howdah.train.job import Job
from howdah.train.keep import Milestones
from howdah.train.measure import peak_flops
from howdah.train.records import Records
from howdah.train.resume import Start, check_match, find_start
from howdah.train.show import Lines, Say, Show, Silent, open_show
from howdah.train.state import restore_states
from howdah.train.step import Stepper, StepResult, train_step
from howdah.train.stop import listen
from howdah.train.watch import Watch

NOTHING: Bytes = {}  # is held by a run that takes no step


@dataclass(frozen=True)
class Outcome:
    """How a run ended: the updates done, and the signal that stopped it early, or 0."""

    step: int
    signal: int

    @property
    def exit_code(self) -> int:
        return 128 + self.signal if self.signal else 0


def train(job: Job, transport: Transport, *, local_rank: int = 0) -> Outcome:
    """Trains `job` on this rank, from wherever its run folder stands to its last step."""
    torch.set_num_threads(job.threads)
    device = device_of(job, local_rank)
    with ExitStack() as stack:
        mesh = stack.enter_context(connect_mesh(job.layout, transport, device))
        request = stack.enter_context(listen())
        if mesh.rank == 0:
            stack.enter_context(hold(job.folder))
        say = (Lines() if mesh.rank == 0 else Silent()).say
        corpus = prepare(job.data, vocab=job.shape.vocab, cache=job.cache, say=say)
        require_same_text(mesh, corpus)
        start = find_start(job, mesh, say)
        placed = place(job, mesh, start, corpus)
        show = stack.enter_context(closing(open_show(mesh.rank, job.pace.steps, start.step)))
        records = stack.enter_context(_records(job, mesh, start))
        stepper = Stepper(placed, mesh, job.method, job.seed)
        tell = telling(show, records)
        milestones = Milestones(job, stepper, corpus, start, records=records, say=tell)
        firsts = first_samples(job, start)
        batches = stack.enter_context(closing(read_batches(job, mesh, corpus, start, firsts)))
        peak = peak_flops(device, DTYPES[job.method.precision])
        watch = Watch(job, stepper, batches, peak=peak, show=show, records=records)

        for line in foretell(job.plan, mesh):
            tell(line)
        if start.step >= job.pace.steps:
            tell(f"no step is left: {start.step} of {job.pace.steps} are done; raise pace.steps")

        step, stopped, held = start.step, False, NOTHING
        while step < job.pace.steps and not stopped:
            rate = learning_rate(job.method.rate, step=step, steps=job.pace.steps)
            asked, batch = request.signal != 0, batches.next()
            if step == start.step:
                held = measured_memory(stepper, batch[0])
            result = train_step(stepper, batch, step=step, rate=rate, stop=asked)
            step, stopped = step + 1, result.stop
            refuse_divergence(result, step)
            watch.step(result, step=step, rate=rate)
            if not stopped:
                with watch.paused():
                    milestones.between(step, samples=firsts[step - start.step])

        milestones.stop(step, samples=firsts[step - start.step])
        if stopped:
            tell(how_to_go_on(job, step))
        else:
            finish(job, milestones, watch, held)
        return Outcome(step, (request.signal or signal.SIGTERM) if stopped else 0)


def device_of(job: Job, local_rank: int) -> torch.device:
    """Where this rank computes. With more ranks than GPUs on a machine, they share them."""
    if job.device == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def require_same_text(mesh: Mesh, corpus: Corpus) -> None:
    """Raises BadInput when the ranks do not all have the same tokens: machines may differ."""
    # The folder's name is a hash of the contents. 32 bits of it: a float64 holds the exact sum of
    # as many as there can be ranks, and equal numbers must add up to equal ones.
    mine = float(int(corpus.folder.name[:8], 16))
    (total,) = mesh.world.sum_scalars([mine])
    if total != mine * mesh.world.size:
        raise BadInput(
            "the ranks have different text: their sources differ between machines; give all of "
            "them the same files in data.sources"
        )


def refuse_divergence(result: StepResult, step: int) -> None:
    """Raises BadInput when training has blown up; nothing of it is saved."""
    if not isfinite(result.norm + result.loss):
        raise BadInput(
            f"training diverged: the gradient norm of step {step} is {result.norm}; go on from "
            "the last checkpoint with a lower method.rate.peak or a longer method.rate.warmup"
        )


def place(job: Job, mesh: Mesh, start: Start, corpus: Corpus) -> Placed:
    """The model on its place in the layout, filled, with its optimizer state."""
    if start.checkpoint:
        check_match(start.checkpoint, job, corpus)
    placed = apply(job.plan, mesh=mesh, fill=start.fill)
    if start.checkpoint:
        restore_states(placed, start.checkpoint)
    if job.compile:
        for block in placed.model.layers.values():
            block.compile()
    return placed


def first_samples(job: Job, start: Start) -> list[int]:
    """Where in the order of samples each step from `start.step` on begins; one more at the end."""
    sizes = (job.batch.size(step) for step in range(start.step, job.pace.steps))
    return list(accumulate(sizes, initial=start.samples))


def read_batches(
    job: Job, mesh: Mesh, corpus: Corpus, start: Start, firsts: list[int]
) -> Prefetch[list[Micro]]:
    """The micro-batches of this rank, step after step, prepared ahead."""
    order = order_of(corpus, sequence=job.data.sequence, seed=job.seed)
    assert job.batch.micro_batch is not None
    rows = Rows(job.batch.micro_batch, job.layout.replicas, mesh.place("replicas"))

    def read(step: int) -> list[Micro]:
        at = min(step - start.step, len(firsts) - 1)  # reading ahead may pass the end
        return micros(corpus, order, rows, first=firsts[at], size=job.batch.size(step))

    return Prefetch(read, step=start.step)


def telling(show: Show, records: Records | None) -> Say:
    """Says a line to the reader, and keeps it in log.txt."""

    def tell(line: str) -> None:
        show.say(line)
        if records:
            records.log(line)

    return tell


@contextmanager
def _records(job: Job, mesh: Mesh, start: Start) -> Iterator[Records | None]:
    """The growing files of the run folder: rank 0's."""
    if mesh.rank != 0:
        yield None
        return
    with closing(Records(job.folder, step=start.step)) as records:
        yield records
