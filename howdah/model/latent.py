"""Multi-head latent attention: keys and values of all heads, unfolded from a few numbers a token.

    x ── q_down ── norm ── q_up ── a heads of (plain | rotary) numbers            q
    x ── kv_down ─┬─ norm ── kv_up ── a heads of (plain key | value)              k, v
                  └─ rotary key, one for all heads

(DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1.) A cache for decoding could keep the
latent alone, `kv_rank` and `qk_rope_size` numbers a token; training unfolds it, and the cache here
keeps unfolded keys and values. Rotary positions turn neighbouring numbers, (x[0], x[1]) first, as
DeepSeek's weights have them; the other forms of attention turn (x[i], x[i + d/2]).
"""

import torch
from torch import Tensor, nn

from howdah.model.attention import Cache, Core, attend, rotate
from howdah.model.documents import Mask
from howdah.model.islands import PLAIN
from howdah.model.norm import build_norm
from howdah.model.partial import padded
from howdah.model.region import WHOLE
from howdah.shapes.shape import ModelShape


class LatentAttention(nn.Module):
    """Latent attention of a block.

    region  the border of the sub-layer: a layout may have some of its heads inside
    """

    def __init__(self, shape: ModelShape, layer: str) -> None:
        super().__init__()
        assert shape.latent is not None, "a model without latent attention has heads of its own"
        self.of, self.layer, h, a = shape.latent, layer, shape.width, shape.heads
        of = self.of
        if of.query_rank:
            self.q_down = nn.Linear(h, of.query_rank, bias=False)
            self.q_norm = build_norm("rmsnorm", of.query_rank, shape.norm_eps)
            self.q_up = nn.Linear(of.query_rank, a * shape.d, bias=False)
        else:
            self.q = nn.Linear(h, a * shape.d, bias=False)
        self.kv_down = nn.Linear(h, of.kv_rank + of.qk_rope_size, bias=False)
        self.kv_norm = build_norm("rmsnorm", of.kv_rank, shape.norm_eps)
        self.kv_up = nn.Linear(of.kv_rank, a * (of.qk_nope_size + of.v_size), bias=False)
        self.o = nn.Linear(a * of.v_size, h, bias=False)
        scaling = shape.rope_scaling
        self.sharper = scaling.latent_logits if scaling else 1.0  # YaRN's, of the logits
        self.core: Core = attend  # some layouts replace it
        self.pads = (
            True  # values, to the size of keys; where ranks share sequences, their core does
        )
        self.islands, self.region = PLAIN, WHOLE

    def forward(
        self, x: Tensor, rotary: Tensor | None, mask: Mask, cache: Cache | None = None
    ) -> Tensor:
        """Map x [b, s, h] → [b, s, h]; `rotary` is the result of `rotary_angles`."""
        assert rotary is not None, "latent attention has rotary positions"
        x, of = self.region.enter(x), self.of
        q = self.q_up(self.q_norm(self.q_down(x))) if of.query_rank else self.q(x)
        q = q.unflatten(-1, (-1, of.qk_nope_size + of.qk_rope_size)).transpose(1, 2)
        latent, turned = self.kv_down(x).split((of.kv_rank, of.qk_rope_size), -1)
        kv = self.kv_up(self.kv_norm(latent)).unflatten(-1, (-1, of.qk_nope_size + of.v_size))
        k, v = kv.transpose(1, 2).split((of.qk_nope_size, of.v_size), -1)
        q, q_turned = q.split((of.qk_nope_size, of.qk_rope_size), -1)
        q = torch.cat([q, self._turn(q_turned, rotary)], -1)
        if self.sharper != 1:
            q = q * self.sharper
        shared = self._turn(turned[:, None], rotary).expand(-1, k.shape[1], -1, -1)
        k = torch.cat([k, shared], -1)
        if cache is not None:
            k, v = cache.extend(self.layer, k, v)
        if self.pads:
            v = padded(v, q.shape[-1])
        out = self.core(q, k, v, mask)[..., : of.v_size]
        out = out.transpose(1, 2).contiguous().flatten(2)
        return self.region.leave(self.o(out))

    def _turn(self, x: Tensor, rotary: Tensor) -> Tensor:
        """Rotate the neighbouring pairs of x [b, heads, s, d]."""
        apart = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return rotate(apart, rotary, self.islands)
