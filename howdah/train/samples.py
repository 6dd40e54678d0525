"""Which samples each step of a run uses, and how they are read ahead of it."""

from collections.abc import Callable
from itertools import accumulate

from howdah.parallel.mesh import Mesh
from howdah.text.batches import micros, order_of, rows_of
from howdah.text.masking import task_of
from howdah.text.order import Order
from howdah.text.prefetch import Prefetch
from howdah.text.tokens import Corpus
from howdah.train.feed import Fed, columns_of, feeder_of
from howdah.train.job import Job
from howdah.train.resume import Start


def first_samples(job: Job, start: Start) -> Callable[[int], int]:
    """Returns a function: step → index of its first sample in the order of samples, for steps from
    `start.step` to the end.
    """
    batch, last = job.batch, job.train.steps
    sizes = (batch.size(step) for step in range(min(batch.ramp_steps, last)))
    ramp = [*accumulate(sizes, initial=0)]  # cumulative; later batches all have one size

    def before(step: int) -> int:
        flat = max(step - len(ramp) + 1, 0)
        return ramp[step - flat] + flat * batch.size(last)

    return lambda step: start.samples + before(min(step, last)) - before(start.step)


def order_of_run(job: Job, corpus: Corpus) -> Order:
    """The order of the samples of a run."""
    return order_of(corpus, sequence=job.data.sequence_length, seed=job.seed)


def read_batches(
    job: Job, mesh: Mesh, corpus: Corpus, start: Start, first: Callable[[int], int]
) -> Prefetch[Fed]:
    """Reads the micro-batches of this rank, step after step, and brings them to its device, ahead
    of their use.
    """
    order = order_of_run(job, corpus)
    assert job.batch.micro_batch is not None
    rows = rows_of(job.layout, mesh.rank, micro=job.batch.micro_batch)
    feed = feeder_of(mesh.device, columns_of(mesh))
    task = task_of(job.shape, job.method, corpus, seed=job.seed)

    def read(step: int) -> Fed:  # ahead of its use: may be past the last step
        found = micros(corpus, order, rows, first=first(step), size=job.batch.size(step))
        return feed([task(micro) for micro in found])

    return Prefetch(read, step=start.step)
