"""The table of a foreign model's parameters: what the floors below ask of a plan.

Where howdah's own model has THE table (`shapes/weights.py`) and a plan, a module has its
`named_parameters`. From them come flat buffers, by unit and dtype, and the list of sums; the
parameters of one group of the optimizer are side by side, so that each group is one range:

    layer1.0, float32   |conv1.weight|conv2.weight|..|bn1.weight|bn1.bias|..|
                        <------- group 0 ----------><------ group 1 ------>

Names of buffers stand in brackets: names of modules that mean something below (`experts`, `frozen`)
mean nothing here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from howdah.base.errors import UserError
from howdah.foreign.units import REST, owners_of
from howdah.model.islands import promoted
from howdah.plan.comm import Comm
from howdah.plan.flat_buffers import SHARE_ALIGN, Buffer, buffers
from howdah.plan.layout import Layout
from howdah.plan.sharding import shard_axes
from howdah.plan.sums import Sum, sums_of_units
from howdah.shapes.weights import Weight

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Run(NamedTuple):
    """The elements [start, stop) of a buffer, which are of one group of the optimizer."""

    start: int
    stop: int
    group: int


@dataclass(frozen=True)
class Table:
    """The trained parameters of a model as units, for one layout.

    layout   resolved
    wide     dtype of masters, gradients and states: at least float32
    buffers  by dtype of the weights, the segment tables
    unit_of  by name of a buffer, the unit; there are several where a unit has several dtypes
    groups   by name of a parameter, the number of its group of the optimizer
    """

    layout: Layout
    wide: torch.dtype
    buffers: Mapping[torch.dtype, tuple[Buffer, ...]]
    unit_of: Mapping[str, str]
    groups: Mapping[str, int]
    comm: Comm = field(default_factory=Comm)

    @property
    def master_bytes(self) -> int:
        """Bytes of an element of a gradient."""
        return self.wide.itemsize

    @property
    def ranks_of_unit(self) -> Mapping[str, tuple[int, ...]]:
        """There are no pipeline stages."""
        return dict.fromkeys(self.unit_of, (0,))

    @property
    def every(self) -> list[Buffer]:
        """All buffers, those of the rest first."""
        some = [buffer for buffers in self.buffers.values() for buffer in buffers]
        return sorted(some, key=lambda buffer: self.unit_of[buffer.unit] != REST)

    def sums(self, rank: int) -> list[Sum]:
        """The sums of gradients in which `rank` takes part: the backward pass is taken to complete
        units from the last to the first, and then the rest.
        """
        return sums_of_units(self, rank, self.every[::-1])

    def slots(self, rank: int) -> tuple[int, int]:
        """The window for gradients of which a rank keeps shares: one slot is filled while another
        is reduced, beside that of the rest. Slots are added where the order is another.
        """
        buckets = [sum(row.messages) for row in self.sums(rank) if row.in_window]
        return (min(3, len(buckets)), max(buckets)) if buckets else (0, 0)

    def runs(self, buffer: Buffer) -> list[Run]:
        """The runs of a buffer, with the padding behind each."""
        found: list[Run] = []
        for segment in buffer.segments:
            group = self.groups[segment.name]
            if found and found[-1].group == group:
                found[-1] = found[-1]._replace(stop=segment.stop)
            else:
                found.append(Run(segment.start, segment.stop, group))
        return found


def table_of(
    model: nn.Module, layout: Layout, units: Sequence[str], groups: Mapping[str, int]
) -> Table:
    """The table of the parameters in `groups`. Raises UserError for dtypes that do not go
    together.
    """
    parameters = {name: p for name, p in model.named_parameters() if name in groups}
    dtypes = {p.dtype: name for name, p in parameters.items()}
    for dtype, name in dtypes.items():
        if dtype not in FLOATS:
            raise UserError(f"{name} is of {dtype}; parameters are float32, float64, bf16 or fp16")
    if torch.float64 in dtypes and len(dtypes) > 1:
        both = " and ".join(f"{name} ({dtype})" for dtype, name in dtypes.items())
        raise UserError(
            f"the model has parameters of float64 beside others: {both}; gradients have one "
            "dtype, so call model.double() or model.float()"
        )
    owners = owners_of(model, units)
    order = {unit: number for number, unit in enumerate([REST, *units])}
    names = sorted(parameters, key=lambda name: (order[owners[name]], groups[name]))
    found: dict[torch.dtype, tuple[Buffer, ...]] = {}
    unit_of: dict[str, str] = {}
    align = SHARE_ALIGN if next(iter(parameters.values())).is_cuda and layout.zero else 1

    def multiple(unit: str) -> int:
        return align * shard_axes(layout, unit)[0].size if align > 1 else 1

    for dtype in dtypes:
        weights = []
        for name in names:
            if parameters[name].dtype != dtype:
                continue
            unit = f"[{owners[name]} {str(dtype).removeprefix('torch.')}]"
            unit_of[unit] = owners[name]
            shape = tuple(parameters[name].shape)
            weights.append(Weight(name, ("any",) * len(shape), shape, unit, True, 0.0, 0.0))
        found[dtype] = buffers(weights, multiple=multiple)
    return Table(layout, promoted(next(iter(dtypes))), found, unit_of, dict(groups))
