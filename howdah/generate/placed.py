"""A model on several ranks, for decoding: stages of layers (pp), and slices of matrices (tp).

    rank 0   embedding layers.0 layers.1     tokens → hidden ─┐
    rank 1   layers.2 layers.3 head             ┌─────────────┘→ logits ── to all ranks
             some heads and columns of each under tp; the logits are gathered

A rank holds its part of the weights and of the cache, and nothing that training would add. All
ranks get the same logits, so all of them choose the same token and call for the next one together.
Stages of a pipeline wait for each other: it makes room, not speed.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from howdah.base.errors import UserError
from howdah.model.attention import Cache
from howdah.model.loss import Add
from howdah.model.transformer import Transformer
from howdah.parallel.flat_params import Fill
from howdah.parallel.mesh import Mesh
from howdah.parallel.ops import Handle, own_operations
from howdah.parallel.stage_links import StageLinks
from howdah.parallel.stages import own_parts
from howdah.parallel.tensor import region_of, split
from howdah.plan.batch import Batch
from howdah.plan.flat_buffers import pieces
from howdah.plan.layout import Layout
from howdah.plan.mesh_axes import axis
from howdah.plan.method import Method
from howdah.plan.plan import Plan, make_plan
from howdah.plan.sharding import local_buffers
from howdah.shapes.shape import ModelShape


def decoding_plan(shape: ModelShape, layout: Layout) -> Plan:
    """What runs where when a model is decoded on a layout. Raises UserError when the layout has
    other words than tp and pp, or does not fit the model.
    """
    plain = Layout(tp=layout.tp, pp=layout.pp)
    if shape.family == "encoder-decoder" and plain.world > 1:
        raise UserError(
            f"layout {layout}: an encoder-decoder is decoded on one process; leave --layout out"
        )
    words = [{**asdict(one), "micros": None, "schedule": None} for one in (plain, layout)]
    if words[0] != words[1]:
        raise UserError(
            f"layout {layout} is for training; decoding takes tp and pp alone, such as tp2 or "
            "pp2 tp2"
        )
    one = Batch(global_batch=1, micro_batch=1)
    return make_plan(shape, plain, one, sequence=shape.context, method=Method())


class PlacedModel:
    """The part of a model that a rank has; the arguments are those of `place`.

    held  elements of the weights that this rank has
    """

    def __init__(self, plan: Plan, mesh: Mesh, fill: Fill, *, dtype: torch.dtype) -> None:
        self.shape, self.device, self.dtype = plan.shape, mesh.device, dtype
        self._mesh, self._pp, layout = mesh, mesh.index_of("pp"), plan.layout
        self._first, self._last = self._pp == 0, self._pp == layout.pp - 1
        values = _filled(plan, mesh, fill, dtype)
        store, self.held = _Weights(values), sum(value.numel() for value in values.values())
        with torch.device("meta"):
            self.model = Transformer(plan.shape, parts=own_parts(plan, mesh.rank))
        if layout.tp > 1:
            split(self.model, plan, region_of(plan, mesh), store)
        own_operations(self.model, store)
        self._links = StageLinks(mesh, [(at, at + 1) for at in range(layout.pp - 1)])
        # the first rank of the last stage tells all others
        self._teller = axis(layout, "pp").stride * (layout.pp - 1)

    @torch.no_grad()
    def next_logits(self, tokens: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        """See Predictor."""
        if self._first:
            x = self.model.embed(tokens, positions)
        else:
            x = torch.empty(*tokens.shape, self.shape.width, dtype=self.dtype, device=self.device)
            self._links.receive(x, self._pp - 1).result()
        context = self.model.context(x, positions, None, cache=cache)
        for block in self.model.layers.values():
            x = block(x, context)
        if not self._last:
            self._links.send(x.contiguous(), self._pp + 1).result()
            logits = x.new_empty(len(tokens), self.shape.vocab)
        else:
            logits = self._logits(self.model.final_norm(x[:, -1:])[:, 0])
        if self._mesh.layout.pp > 1:
            self._mesh.world.broadcast(logits, self._teller)
        return logits

    def _logits(self, hidden: Tensor) -> Tensor:
        """The logits [b, V] of hidden states [b, h], of whose rows this rank may have some."""
        weight = cast(Handle, self.model.head_weight).value()
        mine = F.linear(hidden, weight)
        if self._mesh.tp.size == 1:
            return mine
        whole = mine.new_empty(self.shape.vocab, len(hidden))
        self._mesh.tp.all_gather(whole, mine.T.contiguous())
        return whole.T.contiguous()


def place(plan: Plan, mesh: Mesh, fill: Fill, *, dtype: torch.dtype) -> PlacedModel:
    """Makes this rank's part of a model; `fill` writes each piece of weight. All ranks call
    together.
    """
    return PlacedModel(plan, mesh, fill, dtype=dtype)


class _Weights:
    """Has the weights of own operations; of decoding there are no gradients."""

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        self.value = values.__getitem__

    def expect_gradient(self, name: str) -> None:
        raise AssertionError(f"decoding has no gradient of {name}")

    def add(self, name: str, add: Add, *, now: bool = False) -> None:
        raise AssertionError(f"decoding has no gradient of {name}")


def _filled(plan: Plan, mesh: Mesh, fill: Fill, dtype: torch.dtype) -> dict[str, Tensor]:
    """The weights that a rank has, by name, each as the box that it holds."""
    values: dict[str, Tensor] = {}
    for buffer in local_buffers(plan, mesh.rank):
        flat = torch.zeros(buffer.length, dtype=dtype, device=mesh.device)
        for piece, start, stop in pieces(buffer, 0, buffer.length):
            fill(piece, flat[start:stop])
        values |= {s.name: flat[s.start : s.stop].view(s.box.size) for s in buffer.segments}
    return values
