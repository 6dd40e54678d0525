"""The start of a run: its own newest checkpoint, a folder of weights, or random weights.

A checkpoint in the run folder is always resumed; any layout may have saved it. Rank 0 finds it,
verifies its checksums, and sends the chosen step to the other ranks. Then every rank reads the
pieces that it holds. Where machines have folders of their own, they look together (`apart.py`).
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from howdah.base.errors import UserError, several
from howdah.checkpoint.facts import Facts, facts, updates_of
from howdah.checkpoint.folders import numbered, step_folder
from howdah.checkpoint.index import File
from howdah.checkpoint.load import Checkpoint, newest, open_checkpoint
from howdah.checkpoint.sites import Team
from howdah.model.hub import read_hub
from howdah.parallel.expert_counts import told
from howdah.parallel.flat_params import Fill, random_init
from howdah.parallel.mesh import Mesh
from howdah.plan.boxes import Piece, whole_piece
from howdah.plan.flat_buffers import Orders
from howdah.plan.method import AVERAGE, LATE, Optimizer
from howdah.plan.quantised import FEEDBACK
from howdah.plan.trained import is_adapter, is_magnitude
from howdah.shapes.shape import ModelShape, stated
from howdah.shapes.weights import weights
from howdah.text.batches import order_of
from howdah.text.order import Order
from howdah.text.tokens import Corpus
from howdah.train.adapted import (
    base_problems,
    beside_base,
    by_pieces,
    first_adapter,
    first_lengths,
    trained_problems,
)
from howdah.train.apart import find_apart
from howdah.train.console import Say
from howdah.train.job import Job
from howdah.train.run_folder import clean_run

# What the order of samples depends on, and its name in messages to the user.
ORDER = {
    "seed": "seed",
    "sequence": "data.sequence_length",
    "samples": "samples of each source",
    "shares": "shares of the sources",
    "how": "data.order",
}


@dataclass(frozen=True)
class Start:
    """The state in which training starts.

    fill        writes the initial weights
    checkpoint  the checkpoint that is resumed, or None
    step        number of updates done so far
    samples     number of samples of the order used so far
    team        which ranks share the run folder; None: all
    orders      of experts on the ranks of ep
    """

    fill: Fill
    checkpoint: Checkpoint | None
    step: int
    samples: int
    team: Team | None = None
    orders: Orders = field(default_factory=dict)

    @property
    def updates(self) -> int:
        """How many the optimizer's states have seen: one a step, but where servers have applied
        what each worker pushed on its own.
        """
        return self.step if self.checkpoint is None else updates_of(self.checkpoint)

    @property
    def ahead(self) -> int:
        """How many of them are beyond one a step."""
        return self.updates - self.step


def find_start(job: Job, mesh: Mesh, say: Say, team: Team | None = None) -> Start:
    """Finds the start of this run. All ranks call together and return the same start."""
    checkpoints = job.folder / "checkpoints"
    if team and team.board:
        step = find_apart(job, mesh, team, say)
    else:
        step = _find(checkpoints, mesh, say)
    if step is not None:
        checkpoint = open_checkpoint(step_folder(checkpoints, step))
        say(f"going on from step {checkpoint.step}, saved on {checkpoint.layout}")
        for line in left_out(checkpoint, job):
            say(line)
        fill, routed = read_weights(checkpoint, job), facts(checkpoint).routed
        if by := job.orders(routed.by_block):
            say(told(routed, job.layout.ep, by))
        return Start(fill, checkpoint, checkpoint.step, checkpoint.samples, team, by)
    return Start(first_weights(job), None, 0, 0, team)


def first_weights(job: Job) -> Fill:
    """Returns a Fill with the weights that a run begins with."""
    fresh = random_init(job.plan.weights, job.seed)
    if job.init_from is None:
        return fresh
    base = read_folder(job.init_from, job.shape, job.seed)
    if job.method.adapter is None:
        return base
    if job.init_adapter is None:
        own = beside_base(first_lengths(base, job.plan.weights), fresh, is_magnitude)
    else:
        own = by_pieces(first_adapter(job.init_adapter, job.shape, job.method, job.init_from))
    return beside_base(own, base, is_adapter)


def _find(checkpoints: Path, mesh: Mesh, say: Say) -> int | None:
    """The step that rank 0 chooses, of a folder that all ranks see."""
    chosen = -1
    if mesh.rank == 0:
        clean_run(checkpoints.parent)
        newest_whole = choose(checkpoints, say)
        chosen = newest_whole.step if newest_whole else -1
    (total,) = mesh.world.sum_scalars([chosen + 1 if mesh.rank == 0 else 0])
    return int(total) - 1 if total else None


def choose(checkpoints: Path, say: Say, *, parts: bool = False) -> Checkpoint | None:
    """The newest checkpoint that is complete, or None if nothing was ever saved.

    parts  take one of which other machines have files, too

    Raises UserError when there are checkpoints, but all are damaged: a run that started from
    scratch would overwrite what might still be recovered.
    """
    found = newest(checkpoints, say, parts=parts)
    if found is None and numbered(checkpoints):
        if lacking := _elsewhere(checkpoints):
            raise UserError(
                f"other machines have parts of every checkpoint in {checkpoints}, such as "
                f"{lacking.name} of {lacking.host}: start on these, too, by torchrun, or copy "
                "their files here"
            )
        raise UserError(
            f"every checkpoint in {checkpoints} is damaged; restore one from a copy, or start "
            "again with another folder=PATH"
        )
    return found


def _elsewhere(checkpoints: Path) -> File | None:
    """A file of the newest checkpoint here that another machine has."""
    for step in reversed(numbered(checkpoints)):
        with suppress(UserError):
            return next(iter(open_checkpoint(step_folder(checkpoints, step)).lacks()), None)
    return None


def read_weights(checkpoint: Checkpoint, job: Job) -> Fill:
    """Returns a Fill that reads pieces of weights from a checkpoint; those of a base, beside which
    an adapter is trained, from its folder.
    """

    def own(piece: Piece, out: Tensor) -> None:
        checkpoint.read("weight", piece, out)

    if job.method.adapter is None or job.init_from is None:
        return own
    base = read_folder(job.init_from, job.shape, job.seed)
    return beside_base(own, base, frozenset(checkpoint.names("weight")).__contains__)


def read_folder(folder: Path, shape: ModelShape, seed: int = 0) -> Fill:
    """Returns a Fill that reads pieces of weights from a Hugging Face folder. It raises UserError
    for numbers that are not finite. A head for labels that the folder lacks is drawn by the seed.

    Raises UserError when the model in the folder is not of `shape`. A model with rotary positions
    may get a longer context, and its wavelengths are those of `shape` then.
    """
    sizes = {weight.name: weight.shape for weight in weights(shape)}

    def fresh(name: str) -> Tensor:
        out = torch.empty(sizes[name])
        random_init(weights(shape), seed)(whole_piece(name, sizes[name]), out.view(-1))
        return out

    found, tensor = read_hub(folder, labels=shape.labels, fresh=fresh)
    if shape.positions == found.positions == "rotary" and shape.context > found.context:
        found = replace(found, context=shape.context, rope_scaling=shape.rope_scaling)
        found = replace(found, rope_theta=shape.rope_theta)
    mine = as_plain(stated(shape))
    if different := _different(mine, as_plain(stated(found))):
        raise UserError(
            f"the model in {folder} differs from this run's in {', '.join(different)}; "
            "leave the [model] table out to take the folder's"
        )

    def fill(piece: Piece, out: Tensor) -> None:
        corner, size = piece.box.corner, piece.box.size
        box = tuple(slice(start, start + n) for start, n in zip(corner, size, strict=True))
        rows, *others = box
        part = tensor(piece.name, rows)[:, *others].reshape(-1)[piece.start : piece.stop]
        if not part.isfinite().all():  # a run would seem to diverge at its first step
            raise UserError(
                f"{folder} holds numbers in {piece.name} that are not finite; download "
                "it again, or start from another model"
            )
        out.copy_(part)

    return fill


# -- does the checkpoint belong to this run? ---------------------------------------


def check_match(
    checkpoint: Checkpoint, job: Job, corpus: Corpus, *, reads_base: bool = True
) -> None:
    """Raises UserError, with every reason, when `job` cannot resume from a checkpoint, because it
    would be a different training.

    The checkpoint must not be past the job's last step. Model, tokenizer, order of samples and
    optimizer must be those of the checkpoint; layout, batch, precision and learning rate may
    change. The base of an adapter must have the same checksum, for which it is read.
    """
    saved = facts(checkpoint)
    problems = [
        *_of_length(checkpoint, job),
        *_remedied([*_of_model(job.shape, saved.model), *_of_text(saved, job, corpus)]),
        *_of_optimizer(checkpoint, saved.optimizer, job.method.optimizer),
        *base_problems(saved, job, reads=reads_base),
    ]
    if not problems:
        states = tuple(name for name in job.method.optimizer.states if name in checkpoint.kinds)
        problems = [*trained_problems(checkpoint, job.plan.weights, states)]
    if problems:
        raise UserError(several([f"{checkpoint.path} {problems[0]}", *problems[1:]]))


RESTORE = "restore it, or give another folder=PATH"


def _of_length(checkpoint: Checkpoint, job: Job) -> Iterator[str]:
    if checkpoint.step > job.train.steps:
        yield (
            f"is past train.steps {job.train.steps}; make it {checkpoint.step} or more, or give "
            "another folder=PATH"
        )


def _remedied(found: Sequence[tuple[str, str]]) -> list[str]:
    """Sentences of pairs (what is wrong, its remedy); neighbours with one remedy say it once."""
    pairs = zip_longest(found, [remedy for _, remedy in found[1:]])
    return [what if then == remedy else f"{what}; {remedy}" for (what, remedy), then in pairs]


def _of_model(shape: ModelShape, saved: ModelShape) -> Iterator[tuple[str, str]]:
    mine, theirs = as_plain(stated(shape)), as_plain(stated(saved))
    other = set(_different(mine, theirs))
    if "width" in other and all(one.d * one.heads == one.width for one in (shape, saved)):
        other.discard("head_size")  # it follows
    for name in (one for one in mine if one in other):
        yield f"holds a model with {name} {theirs[name]}, this run has {mine[name]}", RESTORE


def _of_text(saved: Facts, job: Job, corpus: Corpus) -> Iterator[tuple[str, str]]:
    more_text = (
        "restore them, or go on with this text in another run: "
        f"howdah export {job.folder} --to DIR, then init_from=DIR folder=PATH"
    )
    other_tokens = saved.tokenizer != corpus.fingerprint
    if other_tokens:
        yield (
            "was trained with another tokenizer: its text sources or its vocabulary have changed",
            more_text,
        )
    mine = as_plain(order_of(corpus, sequence=job.data.sequence_length, seed=job.seed))
    theirs = as_plain(saved.order)
    other = set(_different(mine, theirs))
    if other_tokens or "sequence" in other:  # then there are other samples too
        other.discard("samples")
    for name in (one for one in ORDER if one in other):
        yield (
            f"was trained with {ORDER[name]} {theirs[name]}, this run has {mine[name]}, so the "
            "next sample would be another",
            more_text if name == "samples" else RESTORE,
        )
    if not (other_tokens or other) and saved.text[:-1] != corpus.checksums[: len(saved.text[:-1])]:
        yield "was trained with other text: the contents of data.sources have changed", more_text


def check_held_out(checkpoint: Checkpoint, corpus: Corpus) -> None:
    """Raises UserError when the held-out text is not that of the checkpoint: its losses would be
    compared with those of another text.
    """
    saved = facts(checkpoint).text
    if saved and corpus.checksums and saved[-1] != corpus.checksums[-1]:
        raise UserError(
            f"{checkpoint.path} was evaluated on other text: the contents of data.validation have "
            "changed, so losses before and after do not compare; restore them, or go on by --resume"
        )


def left_out(checkpoint: Checkpoint, job: Job) -> Iterator[str]:
    """Lines about states of a checkpoint that the run has no use for."""
    used = {"weight", *job.method.optimizer.states}
    if job.method.gradient_feedback:
        used.add(FEEDBACK)
        hops = range(1, 3 if job.layout.hpz else 2)
        mine = {f"hop {hop} rank {rank}" for hop in hops for rank in range(job.layout.world)}
        if {name.split(" ", 1)[1] for name in checkpoint.names(FEEDBACK)} != mine:
            away = "what int4 rounded away before"
            yield f"note        {away} was not saved by these ranks, and is forgotten"
    for state in sorted({*checkpoint.kinds} - used):
        why = ", a step whose update is never made" if state == LATE else ""
        yield f"note        the checkpoint's {state} is left out: this run has none{why}"


def _of_optimizer(checkpoint: Checkpoint, saved: str, optimizer: Optimizer) -> Iterator[str]:
    if saved != optimizer.name:
        yield (
            f"holds the state of {saved}, this run uses {optimizer.name}; go on with {saved}, or "
            "start a new run from an export"
        )
        return
    for state in optimizer.states:
        if state not in checkpoint.kinds:
            needs, way = {
                LATE: ("method.optimizer.delay", "method.optimizer.delay=false"),
                AVERAGE: ("method.optimizer.average", "method.optimizer.average=0"),
            }.get(state, (f"method.optimizer.momentum {optimizer.momentum}", "momentum 0"))
            yield (
                f"holds no {state} of {saved}, which {needs} needs; go on with {way}, or start a "
                "new run from an export"
            )


def _different(mine: dict[str, Any], saved: dict[str, Any]) -> list[str]:
    """The names whose values differ."""
    return [name for name in mine if mine[name] != saved[name]]


def as_plain(facts: ModelShape | Order) -> dict[str, Any]:
    """The fields of a dataclass as JSON returns them: tuples become lists."""
    plain: dict[str, Any] = json.loads(json.dumps(asdict(facts)))
    return plain
