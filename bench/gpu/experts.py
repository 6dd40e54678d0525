"""H: experts, latent attention and shared sequences on a card.

grouped     rows times the matrices of their experts: torch's grouped product beside a loop, in bf16
mixture     steps of two layers of Qwen3-30B-A3B, by howdah and by a loop over transformers' model
latent      a layer of DeepSeek-V2-Lite, attention with values narrower than keys
proved      `verify` on one rank with experts, with a capacity, with latent attention; on two and
            four ranks that share the card with ep, with cp as a ring, by all-to-all and both
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from parity import PROVED, proved
from peers import begin, imported
from rows import Place, Report
from speed import LENGTH, Run, small, speed

from howdah.comm.spawn import Workers
from howdah.model.attention import attend
from howdah.model.grouped import grouped
from howdah.model.partial import attend_part, merge, padded, part_gradients
from howdah.shapes.huggingface_written import config
from howdah.shapes.presets import preset
from howdah.shapes.shape import ModelShape
from howdah.verify.case import Case
from howdah.verify.matrix import case_of

ALONE = ("model=experts x2", "model=capacity x2")
SHARED = (
    "model=experts dp2 ep2 x2",
    "model=capacity dp2 ep2 x2",
    "cp2 x2",
    "cp2 context=all-to-all x2",
    "cp4 context=both x2",
    "model=experts cp2 ep2 x2",
)
MIXTURE_ROWS = 2  # of a micro-batch
STEPS = ("tokens/s", "step ms", "allocated")
PRODUCTS = ("grouped ms", "loop ms", "worst of largest")
ROWS = {
    "grouped product": PRODUCTS,
    "attention in blocks": ("apart", "gradients apart"),
    "attention of narrow values": ("ms", "TFLOP/s"),
    **dict.fromkeys(ALONE, PROVED),
    **dict.fromkeys(SHARED, PROVED),
    **dict.fromkeys(("mixture, howdah", "mixture, transformers"), STEPS),
}


def measure(place: Place, report: Report) -> None:
    report.measure("grouped product", partial(products, place))
    report.measure("attention in blocks", partial(blocks, place))
    report.measure("attention of narrow values", partial(narrow, place))
    with Workers(1, device=place.device.type) as one:
        for words in ALONE:
            report.measure(words, partial(proved, on(place, words), one))
    with Workers(4, device=place.device.type) as four:
        for words in SHARED:
            report.measure(words, partial(proved, on(place, words), four))
    report.measure("mixture, howdah", partial(ours, place))
    report.measure("mixture, transformers", partial(theirs, place))


def on(place: Place, words: str) -> Case:
    """A case of the parity matrix on the place's device."""
    return replace(case_of(words), device=place.device.type, steps=1)


def products(place: Place) -> dict[str, Any]:
    """Rows of 64 experts, unevenly busy, forward and backward."""
    rows, width, inner = place.pick((16_384, 2048, 1408), (64, 16, 24))
    experts = place.pick(64, 4)
    dtype = torch.bfloat16
    x = torch.randn(rows, width, device=place.device, dtype=dtype).requires_grad_()
    weight = torch.randn(experts, inner, width, device=place.device, dtype=dtype)
    weight = (weight * width**-0.5).requires_grad_()
    sizes = torch.rand(experts).square()
    counts = (sizes / sizes.sum() * rows).long()
    counts[-1] += rows - counts.sum()
    told = counts.to(place.device) if not place.cpu else tuple(counts.tolist())

    def run(how: Any) -> tuple[torch.Tensor, ...]:
        out = grouped(x, weight, how)
        return out, *torch.autograd.grad(out.float().square().sum(), (x, weight))

    found = run(told)
    wide = loop(x.detach().float(), weight.detach().float(), counts.tolist())
    apart = (found[0].float() - wide).abs().max() / wide.abs().max()
    seconds = place.seconds(lambda: run(told), repeats=5)
    alone = place.seconds(lambda: loop(x, weight, counts.tolist()), repeats=5)
    return {
        "grouped ms": seconds * 1e3,
        "loop ms": alone * 1e3,
        "worst of largest": float(apart),
    }


def loop(x: torch.Tensor, weight: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """Forward alone, expert after expert."""
    parts = zip(x.split(counts), weight, strict=True)
    return torch.cat([part @ matrix.T for part, matrix in parts])


def blocks(place: Place) -> dict[str, Any]:
    """Two blocks of keys, merged, beside all of them at once; in bf16, heads of a group."""
    length, half = place.pick((1024, 512), (32, 16))
    dtype = torch.bfloat16
    q, k, v = (
        torch.randn(2, heads, length, 64, device=place.device, dtype=dtype) for heads in (8, 2, 2)
    )
    late, early = slice(half, length), slice(0, half)
    out, sums = attend_part(q[:, :, late], k[:, :, late], v[:, :, late], causal=True)
    out, sums = out.float(), sums.float()
    merge(out, sums, *attend_part(q[:, :, late], k[:, :, early], v[:, :, early], causal=False))
    every = [x.float().requires_grad_() for x in (q, k, v)]
    wanted = attend(*every, None)[:, :, late]
    grad = torch.randn_like(wanted)
    theirs = torch.autograd.grad(wanted, every, grad)
    part = q[:, :, late], k[:, :, early], v[:, :, early]
    made = out.to(dtype), sums
    found = part_gradients(grad.to(dtype), part, made, causal=False)
    mine, other = found[1].float(), theirs[1][:, :, early]
    return {
        "apart": float((out - wanted.detach()).abs().max()),
        "gradients apart": float((mine - other).abs().max() / other.abs().max()),
    }


def narrow(place: Place) -> dict[str, Any]:
    """Keys of 192 numbers and values of 128, as DeepSeek's; forward."""
    rows, heads, length = place.pick((1, 16, 4096), (1, 2, 32))
    dtype = torch.bfloat16
    q, k = (torch.randn(rows, heads, length, 192, device=place.device, dtype=dtype) for _ in "qk")
    v = torch.randn(rows, heads, length, 128, device=place.device, dtype=dtype)
    seconds = place.seconds(lambda: attend(q, k, padded(v, 192), None), repeats=5)
    flops = rows * heads * length**2 * (192 + 128)  # half of the square
    return {"ms": seconds * 1e3, "TFLOP/s": flops / seconds / 1e12}


def mixture(place: Place) -> ModelShape:
    """Two layers of 128 experts, of which a token passes eight."""
    large = replace(preset("qwen3-30b-a3b"), layers=2)
    assert large.experts is not None
    few = replace(large.experts, count=4, top_k=2, ffn_size=16)
    shape: ModelShape = place.pick(large, replace(small(large), experts=few))
    return shape


def ours(place: Place) -> dict[str, Any]:
    found = speed(place, Run(mixture(place), MIXTURE_ROWS, compiled=False), 0.0)
    return {name: found[name] for name in STEPS}


def theirs(place: Place) -> dict[str, Any]:
    """transformers' model of the same sizes: float32 weights, bf16 products, torch's AdamW."""
    transformers, shape = imported("transformers"), mixture(place)
    sizes = transformers.AutoConfig.for_model(**config(shape, end=0, dtype="float32"))
    with torch.device(place.device):
        model = transformers.AutoModelForCausalLM.from_config(sizes, attn_implementation="sdpa")
    model.float().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=not place.cpu)
    rows, length = place.pick((MIXTURE_ROWS, LENGTH), (1, 16))
    ids = torch.randint(0, shape.vocab, (rows, length), device=place.device)

    def step() -> None:
        with torch.autocast(place.device.type, torch.bfloat16):
            loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    begin(place)
    seconds = place.seconds(step, repeats=place.pick(5, 1), warm=place.pick(4, 1))
    held = None if place.cpu else torch.cuda.max_memory_allocated(place.device)
    return {"tokens/s": rows * length / seconds, "step ms": 1e3 * seconds, "allocated": held}
