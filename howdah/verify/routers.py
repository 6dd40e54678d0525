"""The losses and biases of routers on one device, from the formulas of `plan/method.py` alone.

The reference hears what each router of its model was given and has chosen, sample by sample, and
computes the rest from it: logits by a product, the losses by autograd, the biases after each step.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from howdah.model.islands import promoted
from howdah.model.moe import Balancing, Choice, Router
from howdah.model.transformer import Transformer
from howdah.plan.flat_buffers import share
from howdah.plan.mesh_axes import axis
from howdah.plan.method import Routing
from howdah.shapes.weights import ROUTER_BIAS
from howdah.verify.case import Case


class HeardRouters:
    """Hears the routers of a model.

    tokens  of each expert since `forget`, by name of its block
    """

    def __init__(self, model: Transformer, how: Routing) -> None:
        self.how, self.tokens = how, dict[str, Tensor]()
        self._heard: list[tuple[str, Router, Tensor, Choice]] = []
        for path, module in model.named_modules():
            if isinstance(module, Router):
                module.register_forward_hook(self._hook(path.removesuffix(".router")))

    def _hook(self, name: str) -> Any:
        def hear(router: Router, given: tuple[Tensor, ...], choice: Choice) -> None:
            self._heard.append((name, router, given[0], choice))

        return hear

    def balancing(self, labelled: int) -> Balancing:
        """What the model is asked for one sample: the capacity, and no losses."""
        return Balancing(Routing(capacity=self.how.capacity), torch.tensor([labelled]), 1.0)

    def losses(self, labelled: int) -> Tensor:
        """The summed losses of the last forward pass, of one sample with so many labels."""
        heard, self._heard = self._heard, []
        total = torch.zeros(())
        for name, router, x, choice in heard:
            assert isinstance(router.weight, Tensor), "a plain model has parameters"
            of, wide = router.experts, promoted(x.dtype)
            logits = F.linear(x[0].to(wide), router.weight.to(wide))
            scores = logits.softmax(-1) if of.scores == "softmax" else logits.sigmoid()
            chosen = F.one_hot(choice.numbers[0], of.count).sum((0, 1)).to(wide)
            often = chosen * of.count / choice.numbers[0].numel()
            mean = (scores / scores.sum(-1, keepdim=True)).mean(0)
            balance = self.how.balance_loss * (often * mean).sum()
            size = self.how.z_loss * logits.logsumexp(-1).square().mean()
            total = total + labelled * (balance + size)
            self.tokens[name] = self.tokens.get(name, 0) + chosen * (labelled > 0)
        return total

    def move_biases(self, masters: Mapping[str, Tensor]) -> None:
        """Moves the biases after a step, and forgets its tokens."""
        for name, tokens in self.tokens.items():
            bias = masters.get(f"{name}.{ROUTER_BIAS}")
            if bias is not None:
                bias.data += self.how.bias_rate * (tokens.double().mean() - tokens).sign()
        self.tokens = {}


def routed_bytes(case: Case, rank: int, routed: Sequence[Mapping[str, list[int]]]) -> int:
    """The bytes that `rank` sends along ep without a capacity, from the rows that each rank gave to
    each expert in all forward passes: rows there and back, gradients of both, and the numbers.
    """
    plan = case.plan
    along, width = axis(plan.layout, "ep"), plan.shape.width * plan.compute_bytes
    ranks = list(along.group(rank))
    assert plan.shape.experts is not None, "only experts have routes"
    cuts = [share(plan.shape.experts.count, along.size, index) for index in range(along.size)]
    (first, last), total = cuts[along.index_of(rank)], 0
    for name, mine in routed[rank].items():
        still = plan.block(name) in plan.marks.still  # no gradients, and nothing runs again
        runs = 2 if plan.recompute[plan.block(name)] == "full" and not still else 1
        for other, (start, stop) in zip(ranks, cuts, strict=True):
            if other != rank:
                rows = sum(mine[start:stop]) + sum(routed[other][name][first:last])
                total += rows * width * (runs + (not still)) // runs
                total += (stop - start) * 8 * runs * plan.micros * case.steps
    return total
