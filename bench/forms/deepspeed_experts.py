"""DeepSpeed's mixture of experts over gloo: its `MoE` layer in the place of howdah's in each block.

    router      its gate for two experts, without noise: the two best, weights divided by their sum
    dropless    `drop_tokens=False`: each expert gets as many rows as the busiest one of all ranks,
                empty ones among them, so that one all-to-all of equal messages serves
    gradients   its engine sums them: dense ones over both ranks, those of experts over nobody
    optimizer   torch's fused AdamW, as for everyone

Its own clipping is off: it clips by the mean of the ranks' norms. Gradients are clipped in front of
the optimizer by the norm of all.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from cases import RATE, method
from deepspeed_peer import begun, steps_of
from howdahs import Place
from layouts import Form
from peers import Step, filled
from torch import Tensor, nn

from howdah.model.feedforward import FeedForward
from howdah.plan.flat_buffers import share
from howdah.shapes.weights import weights

MATRICES = ("gate", "up", "down")


def deepspeed_experts(case: Form, place: Place) -> Step:
    deepspeed = begun(place)
    module = filled(case)
    decays = {weight.name: weight.decay for weight in weights(case.shape)}
    own: dict[str, nn.Parameter] = {}
    for number, block in module.model.layers.items():
        own |= _replaced(block, f"layers.{number}", case, place)
    dense = {n: p for n, p in module.model.named_parameters() if n in decays}
    gates = {
        f"layers.{number}.router.weight": block.moe.deepspeed_moe.gate.wg.weight
        for number, block in module.model.layers.items()
    }
    named = dense | gates | own
    assert len(named) == len([*module.parameters()])
    constants, limit = method(case).optimizer, method(case).grad_clip
    groups = [
        {
            "params": [p for n, p in named.items() if decays[n.split("@")[0]] is decay],
            "weight_decay": constants.weight_decay if decay else 0.0,
        }
        for decay in (True, False)
    ]
    optimizer = torch.optim.AdamW(
        groups, lr=RATE, betas=constants.betas, eps=constants.epsilon, fused=True
    )
    whole, parts = [*(dense | gates).values()], [*own.values()]
    optimizer.register_step_pre_hook(lambda *_: _clip(whole, parts, limit))
    engine, *_ = deepspeed.initialize(
        model=module, optimizer=optimizer, config=_settings(case, place)
    )
    return steps_of(engine)


def _replaced(block: Any, name: str, case: Form, place: Place) -> dict[str, nn.Parameter]:
    """Puts DeepSpeed's layer into a block, with howdah's start. Returns the weights of the experts
    here, by the name of the stacked matrix and the expert's number.
    """
    from deepspeed.moe.layer import MoE

    of = case.shape.experts
    assert of is not None and of.top_k == 2 and of.normalise and of.scores == "softmax"
    block.moe = MoE(
        case.shape.width,
        FeedForward(case.shape, of.ffn_size),
        num_experts=of.count,
        ep_size=place.size,
        k=of.top_k,
        drop_tokens=False,
        use_rts=False,
        top2_2nd_expert_sampling=False,
    )
    inside = block.moe.deepspeed_moe
    inside.gate.wg.weight.data.copy_(block.router.weight.detach())
    first, stop = share(of.count, place.size, place.rank)
    own = {}
    experts = inside.experts.deepspeed_experts
    for number, expert in zip(range(first, stop), experts, strict=True):
        for matrix in MATRICES:
            weight = getattr(expert, matrix).weight
            weight.data.copy_(getattr(block.experts, matrix).weight.detach()[number])
            own[f"{name}.experts.{matrix}.weight@{number}"] = weight
    del block.router, block.experts
    block.feed = lambda x, balancing: block.moe(x)[0]
    return own


@torch.no_grad()
def _clip(whole: Sequence[Tensor], parts: Sequence[Tensor], limit: float) -> None:
    """To the norm of the whole gradient: `whole` is the same on all ranks, `parts` are each's."""
    square = sum(_gradient(p).square().sum() for p in parts)
    assert isinstance(square, Tensor)
    dist.all_reduce(square)
    square += sum(_gradient(p).square().sum() for p in whole)
    scale = (limit / (square.sqrt() + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_([_gradient(p) for p in (*whole, *parts)], scale)


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _settings(case: Form, place: Place) -> dict[str, Any]:
    micro = case.rows // case.micros
    return {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": case.micros,
        "train_batch_size": micro * case.micros * place.size,
        "communication_data_type": "fp32",
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1_000_000,
    }
