"""What is run twice: once by the layout, once by one device.

By default it is a miniature of the run: the same forms (norms, positions, feed-forward, tied or
not), every axis shrunk to 2 or 3, two layers, the same ratio of heads and the same remainders of
the vocabulary, on text made up by a counter hash, with documents of different length and a last
batch that does not divide. `full` takes the run as it is, with its own text.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np

from howdah.base.errors import UserError
from howdah.base.seeds import key, mix
from howdah.plan.batch import Batch
from howdah.plan.layout import Layout
from howdah.plan.method import Method, Precision
from howdah.plan.plan import Plan, make_plan
from howdah.plan.program import with_schedule
from howdah.plan.schedule.actions import Schedule
from howdah.shapes.shape import ModelShape
from howdah.text.sources import Data
from howdah.text.tokens import Corpus, Tokens, prepare
from howdah.train.job import Job


@dataclass(frozen=True)
class Case:
    """A model, a layout and a batch to compare on.

    samples  of the global batch of every step
    micro    samples that a rank of the layout runs at once
    text     the run's own text and its cache, or None for made-up text
    schedule of the user's own, in place of the layout's
    """

    shape: ModelShape
    layout: Layout
    method: Method
    samples: int
    micro: int
    sequence: int
    steps: int
    seed: int
    text: tuple[Data, Path] | None = None
    schedule: Schedule | None = None

    @property
    def plan(self) -> Plan:
        """The case as the simulator takes it."""
        most = -(-self.samples // self.layout.readers)
        batch = Batch(global_batch=self.samples, micro_batch=min(self.micro, most))
        plan = make_plan(self.shape, self.layout, batch, sequence=self.sequence, method=self.method)
        return with_schedule(plan, self.schedule) if self.schedule else plan


def check_case(dtype: str, *, steps: int) -> Precision:
    """The precision that `dtype` names. Raises UserError for another word, or no steps."""
    if dtype not in ("float64", "float32", "bf16"):
        raise UserError(f"--dtype {dtype!r} is unknown; use float64, float32 or bf16")
    if steps < 1:
        raise UserError(f"--steps {steps} compares nothing; use at least 1")
    return cast(Precision, dtype)


def full_case(job: Job, *, precision: Precision, steps: int) -> Case:
    """The run itself."""
    assert job.batch.micro_batch is not None
    return Case(
        shape=job.shape,
        layout=job.layout,
        method=replace(job.method, precision=precision),
        samples=job.batch.size(0),
        micro=job.batch.micro_batch,
        sequence=job.data.sequence_length,
        steps=steps,
        seed=job.seed,
        text=(job.data, job.cache),
        schedule=job.plan.schedule,
    )


def miniature(job: Job, *, precision: Precision, steps: int) -> Case:
    """The run shrunk: see the top of this file."""
    layout = small_layout(job.layout, own_schedule=job.plan.schedule is not None)
    micro, sequence = 2, 24
    rows = micro * layout.readers * (layout.micros or 1)
    shape = small_shape(job.shape, context=sequence)
    layout = replace(layout, tp=small_parts(job.layout.tp, job.shape, shape))
    return Case(
        shape=replace(shape, layers=max(shape.layers, layout.pp * layout.virtual)),
        layout=layout,
        method=replace(job.method, precision=precision),
        samples=rows - 1 if rows > micro else rows,  # the last rank's last row is padding
        micro=micro,
        sequence=sequence,
        steps=steps,
        seed=job.seed,
        schedule=job.plan.schedule,
    )


def small_layout(layout: Layout, *, own_schedule: bool) -> Layout:
    """Every axis shrunk, both cuts of dp under shardG; stages and micro-batches as a schedule of
    one's own has them.
    """
    pp, micros = layout.pp, layout.micros or 1
    if not own_schedule:
        pp, micros = shrink(pp), shrink(micros)
    virtual = shrink(layout.virtual)
    shard = layout.shard and shrink(layout.shard)
    tp, dp = shrink(layout.tp), (shard or 1) * shrink(layout.replicas // (layout.shard or 1))
    return replace(layout, pp=pp, dp=dp, tp=tp, shard=shard, virtual=virtual, micros=micros)


def small_parts(parts: int, shape: ModelShape, small: ModelShape) -> int:
    """Parts of matrices in a miniature: as many as it has heads for, and key-value heads are
    shared by several parts where the run's are.
    """
    if parts <= shape.k:
        return min(shrink(parts), small.k)
    return small.k * min(shrink(parts // shape.k), small.heads // small.k)


def shrink(degree: int) -> int:
    """1, 2 and 3 stay; larger degrees become 2 or 3, odd ones staying odd."""
    return degree if degree <= 3 else 2 + degree % 2


def small_shape(shape: ModelShape, *, context: int) -> ModelShape:
    """The same forms at a size that takes milliseconds."""
    ratio = shape.heads // shape.k
    kv_heads = shrink(shape.k)
    heads, head_size = ratio * kv_heads, 8
    return replace(
        shape,
        layers=2,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        width=heads * head_size,
        ffn=24 + shape.ffn % 8,
        vocab=64 + shape.vocab % 64,
        context=context,
    )


def corpus_of(case: Case) -> Corpus:
    """The text of a case."""
    if case.text is not None:
        data, cache = case.text
        return prepare(data, vocab=case.shape.vocab, cache=cache, say=lambda _: None)
    samples = case.samples * (case.steps + 1)
    tokens = made_up(case.shape.vocab, length=samples * case.sequence + 1)
    return Corpus(
        folder=Path(),
        sources=(tokens,),
        weights=(1.0,),
        names=("made up",),
        held_out=tokens,
        fingerprint="",
        entries=case.shape.vocab,
        end=0,
        documents=len(tokens.starts),
        duplicates=0,
        skipped=0,
        held_out_bytes=1,
        held_out_gzip=1,
        held_out_xz=1,
    )


def made_up(vocab: int, *, length: int) -> Tokens:
    """Tokens by hash, in documents of 1 to 40 tokens, each begun by token 0."""
    counters = np.arange(length, dtype=np.uint64)
    ids = (1 + mix(key("verify", "token"), counters) % np.uint64(vocab - 1)).astype(np.int64)
    lengths = 1 + (mix(key("verify", "length"), counters) % np.uint64(40)).astype(np.int64)
    starts = np.cumsum(lengths) - lengths
    starts = starts[starts < length]
    ids[starts] = 0
    return Tokens(ids, starts)
