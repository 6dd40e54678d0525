"""A model on several ranks, for decoding: stages of layers (pp), and slices of matrices (tp).

    rank 0   embedding layers.0 layers.1     tokens → hidden ─┐
    rank 1   layers.2 layers.3 head             ┌─────────────┘→ logits ── to all ranks
             some heads and columns of each under tp; the logits are gathered

A rank holds its part of the weights and of the cache, and nothing that training would add. All
ranks get the same logits, so all of them choose the same token and call for the next one together.
Stages of a pipeline wait for each other: it makes room, not speed.

Of an encoder-decoder a source passes through all stages once. What the encoder has made of it rides
on through those of the decoder, which keep it; each token then begins at the stage of the target.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from howdah.base.errors import UserError
from howdah.model.attention import Cache
from howdah.model.block import BlockContext
from howdah.model.loss import Add
from howdah.model.norm import value_of
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
from howdah.plan.program import stage_parts
from howdah.plan.sharding import local_buffers
from howdah.shapes.part import Part
from howdah.shapes.shape import ModelShape


def decoding_plan(shape: ModelShape, layout: Layout) -> Plan:
    """What runs where when a model is decoded on a layout. Raises UserError when the layout has
    other words than tp and pp, or does not fit the model.
    """
    plain = Layout(tp=layout.tp, pp=layout.pp)
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
        self._last, self._target = self._pp == layout.pp - 1, _stage_of(plan, Part("target"))
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
        """Logits [b, V] of the token behind `tokens` [b, s], on all ranks."""

        def run(x: Tensor | None) -> Tensor:
            x = self.model.embed(tokens, positions) if x is None else x
            context = self.model.context(x, positions, None, cache=cache)
            return _through(self.model.layers, x, context)

        return self._next(len(tokens), self._passed(tokens, run))

    @torch.no_grad()
    def states(self, text: Sequence[int]) -> Tensor:
        """The last hidden states [1, s, h] of the tokens of a text, in front of the head, on all
        ranks; of an encoder-decoder those of the encoder.
        """
        if self.shape.encoder_layers:
            x = self.encode(torch.tensor([text], device=self.device), None)
        else:
            x = self._read(text)
            if self._last and self.shape.norm_at == "before":
                x = self.model.norm(x)
        return self._told(x, (1, len(text), self.shape.width))

    @torch.no_grad()
    def scores(self, text: Sequence[int], places: Sequence[int]) -> Tensor:
        """What the head says [n, V] of some places of a text, on all ranks."""
        x = self._read(text)
        if self._last:
            x = self._logits(self.model.final_norm(x[0, places]))
        return self._told(x, (len(places), self.shape.outputs))

    def _read(self, text: Sequence[int]) -> Tensor:
        """What this stage makes [1, s, h] of a text."""
        tokens = torch.tensor([text], device=self.device)
        positions = torch.arange(len(text), device=self.device)[None]

        def run(x: Tensor | None) -> Tensor:
            x = self.model.embed(tokens, positions) if x is None else x
            return _through(self.model.layers, x, self.model.context(x, positions, None))

        return self._passed(tokens, run)

    @torch.no_grad()
    def encode(self, source: Tensor, seen: Tensor | None) -> Tensor:
        """What the encoder makes [b, t, h] of source tokens [b, t]; where no tokens are decoded,
        [b, 0, h].
        """

        def run(x: Tensor | None) -> Tensor:
            x = self.model.embed(source, source) if x is None else x
            if self.model.encoder:
                context = self.model.source_context(self.device, source.shape[1], seen)
                x = _through(self.model.encoder, x, context)
            return self.model.encoder_norm(x) if hasattr(self.model, "encoder_norm") else x

        x = self._passed(source, run)
        return x if self._pp >= self._target else x.new_empty(len(x), 0, self.shape.width)

    @torch.no_grad()
    def behind(self, tokens: Tensor, source: Tensor, seen: Tensor | None, cache: Cache) -> Tensor:
        """Logits [b, V] of the token behind `tokens` [b, s], which read `source`, on all ranks."""

        def run(x: Tensor | None) -> Tensor:
            x = self.model.embed(tokens, tokens, place="target") if x is None else x
            if not self.model.layers:
                return x
            context = self.model.target_context(source, tokens.shape[1], seen, cache=cache)
            return _through(self.model.layers, x, context)

        here = self._pp >= self._target
        return self._next(len(tokens), self._passed(tokens, run, self._target) if here else None)

    def _passed(
        self, tokens: Tensor, run: Callable[[Tensor | None], Tensor], first: int = 0
    ) -> Tensor:
        """What this stage makes of tokens [b, s] that enter at the stage `first`: `run` of what the
        stage before has made, which goes to the next.
        """
        x = None
        if self._pp > first:
            x = torch.empty(*tokens.shape, self.shape.width, dtype=self.dtype, device=self.device)
            self._links.receive(x, self._pp - 1).result()
        x = run(x)
        if not self._last:
            self._links.send(x.contiguous(), self._pp + 1).result()
        return x

    def _next(self, rows: int, x: Tensor | None) -> Tensor:
        """The logits [rows, V] behind the last tokens of x [rows, s, h], on all ranks."""
        if self._last:
            assert x is not None, "the last stage has the head"
            x = self._logits(self.model.final_norm(x[:, -1:])[:, 0])
        return self._told(x, (rows, self.shape.vocab))

    def _told(self, x: Tensor | None, sizes: tuple[int, ...]) -> Tensor:
        """What the last stage has found, on all ranks."""
        if not self._last or x is None:
            x = torch.empty(sizes, dtype=self.dtype, device=self.device)
        x = x.contiguous()
        if self._mesh.layout.pp > 1:
            self._mesh.world.broadcast(x, self._teller)
        return x

    def _logits(self, hidden: Tensor) -> Tensor:
        """The logits [b, V] of hidden states [b, h], of whose rows this rank may have some."""
        weight, bias = cast(Handle, self.model.head_weight), self.model.head_bias
        mine = F.linear(hidden, weight.value(), None if bias is None else value_of(bias))
        if self._mesh.tp.size == 1 or self.shape.labels:  # whose rows each rank has
            return mine
        whole = mine.new_empty(self.shape.vocab, len(hidden))
        self._mesh.tp.all_gather(whole, mine.T.contiguous())
        return whole.T.contiguous()


def place(plan: Plan, mesh: Mesh, fill: Fill, *, dtype: torch.dtype) -> PlacedModel:
    """Makes this rank's part of a model; `fill` writes each piece of weight. All ranks call
    together.
    """
    return PlacedModel(plan, mesh, fill, dtype=dtype)


def _stage_of(plan: Plan, part: Part) -> int:
    """The stage that runs a part; 0 where the model has none."""
    stages = (stage_parts(plan, at).values() for at in range(plan.layout.pp))
    return next((at for at, own in enumerate(stages) if any(part in some for some in own)), 0)


def _through(blocks: nn.ModuleDict, x: Tensor, context: BlockContext) -> Tensor:
    for block in blocks.values():
        x = block(x, context)
    return x


class _Weights:
    """Has the weights of own operations; of decoding there are no gradients."""

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        self.value = values.__getitem__

    def rows(self, name: str, index: Tensor) -> Tensor:
        return F.embedding(index, self.value(name))

    def expect_gradient(self, name: str) -> None:
        raise AssertionError(f"decoding has no gradient of {name}")

    def add(self, name: str, add: Add, *, now: bool = False) -> None:
        raise AssertionError(f"decoding has no gradient of {name}")

    def add_rows(self, name: str, index: Tensor, rows: Tensor) -> None:
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
