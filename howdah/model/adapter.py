"""Matrices of low rank beside frozen ones (LoRA, https://arxiv.org/abs/2106.09685).

    x [.., in] ──┬── W [out, in] ───────────────────────┬── + ── y [.., out]
                 └── A [r, in] ── B [out, r] ── · s ────┘

s is alpha/r. B starts at zero, so a model with fresh adapters computes what it computed without
them. What was trained is W + s·B·A, which a model has place for (`merged`).
"""

import torch
from torch import Tensor, nn

from howdah.model.islands import promoted
from howdah.plan.method import Adapter
from howdah.shapes.marks import Marks


class AdaptedLinear(nn.Linear):
    """A linear with an adapter, of the same name; the adapter's are `lora_a` and `lora_b` in it."""

    def __init__(self, plain: nn.Linear, rank: int, scale: float) -> None:
        super().__init__(plain.in_features, plain.out_features, bias=plain.bias is not None)
        self.lora_a = nn.Linear(plain.in_features, rank, bias=False)
        self.lora_b = nn.Linear(rank, plain.out_features, bias=False)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., in] → [..., out]."""
        return torch.add(super().forward(x), self.lora_b(self.lora_a(x)), alpha=self.scale)


def adapt(model: nn.Module, marks: Marks, adapter: Adapter | None) -> None:
    """Gives linears of a model adapters; those that it does not have are left out."""
    if adapter is None:
        return
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and f"{path}.weight" in marks.adapted:
            parent, _, leaf = path.rpartition(".")
            own = AdaptedLinear(module, adapter.rank, adapter.scale)
            setattr(model.get_submodule(parent), leaf, own)


def merged(base: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """W + s·B·A in the dtype of W, computed in at least float32."""
    wide = promoted(base.dtype)
    return torch.addmm(base.to(wide), b.to(wide), a.to(wide), alpha=scale).to(base.dtype)
