"""Plan: a model, a layout and a batch that fit together, and the stages that follow from them.

A Plan holds everything that is decided before a run, in one frozen object. The trainer, the
simulator, the drawings and the checks read it; none of them adds to it. `make_plan` refuses inputs
that do not fit together, and reports all their problems at once.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property

from howdah.base.errors import UserError
from howdah.plan.batch import Batch, resolve_batch
from howdah.plan.check import check_plan
from howdah.plan.chosen_blocks import is_chosen
from howdah.plan.comm import Comm
from howdah.plan.flat_buffers import SHARE_ALIGN, Buffer
from howdah.plan.layout import Layout, family_of
from howdah.plan.method import Method, Precision
from howdah.plan.schedule.actions import Schedule
from howdah.plan.stages import Stages, by_cost, counted, looped, v_shaped
from howdah.plan.storage import Storage
from howdah.plan.trained import marks_of, table_of
from howdah.shapes.activations import Recompute
from howdah.shapes.marks import Marks
from howdah.shapes.part import Part
from howdah.shapes.products import part_flops
from howdah.shapes.shape import ModelShape
from howdah.shapes.weights import FROZEN, Weight, parts, parts_of

BYTES: dict[Precision, int] = {"float32": 4, "bf16": 2, "fp16": 2, "float64": 8}


@dataclass(frozen=True)
class Plan:
    """Everything that is decided before a run.

    layout    resolved: its world size and its number of micro-batches are known
    batch     resolved too; its sizes are in samples
    sequence  tokens per sample
    stages    the parts of the model on each stage, and the pipeline rank of each stage
    schedule  the user's own schedule, in place of the layout's (`plan/program.py`)
    comm      how messages travel
    storage   how what is not on the device is kept and moved
    share_align  shares of flat buffers have one length, a multiple of so many elements; 1: they
              are cut at any element, and their lengths may differ by one
    """

    shape: ModelShape
    layout: Layout
    batch: Batch
    sequence: int
    method: Method
    stages: Stages
    schedule: Schedule | None = None
    share_align: int = 1
    comm: Comm = field(default_factory=Comm)
    storage: Storage = field(default_factory=Storage)

    @property
    def micro_batch(self) -> int:
        """Samples that one replica runs at once."""
        assert self.batch.micro_batch is not None
        return self.batch.micro_batch

    @property
    def micros(self) -> int:
        """Micro-batches that each replica takes per step."""
        assert self.layout.micros is not None
        return self.layout.micros

    @property
    def on_gpus(self) -> bool:
        """Whether it is a plan for GPUs (`for_gpus`)."""
        return self.share_align > 1

    @property
    def master_bytes(self) -> int:
        """Bytes of an element of master weights, gradients and moments: at least float32."""
        return max(4, self.compute_bytes)

    @property
    def sent_gradient_bytes(self) -> int:
        """Bytes of an element of a gradient while it is sent."""
        return BYTES["bf16"] if self.method.gradient_dtype == "bf16" else self.master_bytes

    @property
    def quantised(self) -> bool:
        """Whether weights are gathered in 8 bits (`plan/quantised.py`)."""
        return self.method.gather_dtype == "int8"

    @property
    def in_blocks(self) -> bool:
        """Whether shares are cut between blocks that have a scale each."""
        return self.quantised or self.method.gradient_dtype == "int4"

    @property
    def compute_bytes(self) -> int:
        """Bytes of an element of weights and activations."""
        return BYTES[self.method.compute]

    @cached_property
    def rank_of_part(self) -> dict[Part, int]:
        """The pipeline rank of each part of the model."""
        pairs = zip(self.stages.parts, self.stages.where, strict=True)
        return {part: rank for parts, rank in pairs for part in parts}

    @cached_property
    def recompute(self) -> dict[Part, Recompute]:
        """By block, what the backward pass recomputes; parts that are no blocks are left out."""
        chosen, how = self.layout.recompute_blocks, self.layout.recompute
        blocks = ([part for part in parts if part.is_block] for parts in self.stages.parts)
        return {
            part: how if is_chosen(chosen, part, index) else "none"
            for stage in blocks
            for index, part in enumerate(stage)
        }

    @cached_property
    def weights(self) -> tuple[Weight, ...]:
        """Every weight of the model, in forward order, as the method trains them."""
        return table_of(self.shape, self.method)

    @cached_property
    def marks(self) -> Marks:
        """What is trained."""
        return marks_of(self.shape, self.method)

    def still(self, stage: int) -> bool:
        """Whether a stage has no backward pass."""
        return self.marks.still.issuperset(self.stages.parts[stage])

    @cached_property
    def starts(self) -> Part | None:
        """The part at which the graph of a backward pass begins, if parts before it have none."""
        every = [part for some in self.stages.parts for part in some]
        found = next((part for part in every if part not in self.marks.still), None)
        return found if self.marks.still else None

    @cached_property
    def bundles(self) -> dict[str, tuple[str, ...]]:
        """The units that are used together: what is trained of one, and what is frozen."""
        found: dict[str, list[str]] = {}
        for unit in self.ranks_of_unit:
            found.setdefault(unit.removeprefix(FROZEN), []).append(unit)
        return {name: tuple(units) for name, units in found.items()}

    @cached_property
    def weights_at(self) -> dict[int, tuple[Weight, ...]]:
        """The weights of each pipeline rank, in forward order."""
        found: dict[int, list[Weight]] = {rank: [] for rank in range(self.layout.pp)}
        for weight in self.weights:
            for rank in self.ranks_of_unit[weight.unit]:
                found[rank].append(weight)
        return {rank: tuple(mine) for rank, mine in found.items()}

    @cached_property
    def laid(self) -> dict[tuple[int, ...], tuple[Buffer, ...]]:
        """The flat buffers that were asked for, by the place of their rank (`plan/sharding.py`)."""
        return {}

    def block(self, name: str) -> Part:
        """The block called `name`."""
        (part,) = parts_of(name, self.shape)
        return part

    def weight(self, name: str) -> Weight:
        """The weight called `name`."""
        return self._by_name[name]

    @cached_property
    def _by_name(self) -> dict[str, Weight]:
        return {weight.name: weight for weight in self.weights}

    @cached_property
    def ranks_of_unit(self) -> dict[str, tuple[int, ...]]:
        """The pipeline ranks that hold each unit: several for a tied unit."""
        units = dict.fromkeys(weight.unit for weight in self.weights)
        return {
            unit: tuple(sorted({self.rank_of_part[part] for part in parts_of(unit, self.shape)}))
            for unit in units
        }

    def sparse(self, part: Part) -> bool:
        """Whether a part is a block with experts."""
        return part.is_block and part.stack == "layers" and self.shape.sparse(part.layer)

    def boundary(self, stage: int) -> tuple[str, ...]:
        """The tensors [tokens, width] that the stage sends to the next stage: the residual stream,
        and between stages of a decoder also the encoder's output, which all of them use.
        """
        after = self.stages.parts[stage + 1][0]
        inside = self.shape.family == "encoder-decoder" and after.stack == "layers"
        return ("hidden", "source") if inside else ("hidden",)


def make_plan(
    shape: ModelShape, layout: Layout, batch: Batch, *, sequence: int, method: Method
) -> Plan:
    """The plan of a run on a layout whose dp is known. Raises UserError with every problem.

    sequence  tokens per sample
    """
    problems = check_plan(shape, layout, batch, method, sequence=sequence)
    if problems:
        raise UserError("; ".join(problems))
    batch, layout = resolve_batch(batch, layout)
    return Plan(shape, layout, batch, sequence, method, make_stages(shape, layout, sequence))


def for_gpus(plan: Plan) -> Plan:
    """The plan on GPUs: shares are equal, as NCCL needs them, and kernels are those of a GPU."""
    return replace(plan, share_align=SHARE_ALIGN)


def beside(plan: Plan, other: Plan) -> Plan:
    """`other` for the machines of `plan`."""
    return replace(other, share_align=plan.share_align)


def make_stages(
    shape: ModelShape, layout: Layout, sequence: int, where: tuple[int, ...] | None = None
) -> Stages:
    """The parts of each stage: those that the layout gives, or chosen so that the slowest stage has
    as few FLOPs as possible.

    Embedding and head are parts with costs of their own. where[stage] is the pipeline rank of each
    stage; None: the layout's schedule decides. Raises UserError for more stages than parts.
    """
    costs = {part: float(part_flops(shape, part, sequence)) for part in parts(shape)}
    if where is None:
        folded = family_of(layout).folded
        where = v_shaped(layout.pp) if folded else looped(layout.pp, layout.virtual)
    if layout.stages:
        return counted(tuple(costs), layout.stages, where)
    return by_cost(costs, where)
