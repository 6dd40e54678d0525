"""What a recipe says that is allowed, and is perhaps not meant: a sentence for each, told before a
run starts.
"""

from collections.abc import Iterator

from howdah.plan.method import LearningRate
from howdah.plan.plan import Plan
from howdah.train.job import Training
from howdah.train.length import in_steps


def notes_of(plan: Plan, train: Training) -> Iterator[str]:
    """Yields the notes on a run's settings; they keep nothing from running."""
    rate, layout, batch = plan.method.lr, plan.layout, plan.batch
    train = in_steps(train, batch, plan.sequence)
    if not train.epochs:  # the steps of an epoch depend on the text
        yield from _rate_notes(rate, train.steps)
    if layout.zero and layout.sharers == 1:
        yield f"zero{layout.zero} shards nothing: each copy of the states is on one rank"
    assert batch.global_batch is not None
    places = layout.readers * plan.micros * plan.micro_batch
    if empty := places - batch.global_batch:
        yield (
            f"{empty:,} of {places:,} places in a step stay empty: global_batch is "
            f"{batch.global_batch:,}, in micro-batches of {plan.micro_batch:,} on '{layout}'"
        )


def _rate_notes(rate: LearningRate, steps: int) -> Iterator[str]:
    if rate.warmup_steps >= steps:
        yield (
            f"the learning rate does not reach its peak: method.lr.warmup_steps is "
            f"{rate.warmup_steps:,} and train.steps {steps:,}"
        )
    elif rate.schedule == "wsd" and rate.warmup_steps + rate.decay_steps > steps:
        yield (
            f"the learning rate's warm-up and decay overlap: {rate.warmup_steps:,} and "
            f"{rate.decay_steps:,} of {steps:,} steps"
        )
