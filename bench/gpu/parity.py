"""B: the numbers of the CPU: miniatures of every form and family by `verify`, and what surrounds a
step.
"""

import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rows import Place, Report

from howdah.checkpoint.folders import step_folder
from howdah.checkpoint.index import About
from howdah.checkpoint.load import open_checkpoint
from howdah.checkpoint.save import Saver
from howdah.checkpoint.snapshot import snapshots_of
from howdah.comm.spawn import Workers
from howdah.parallel.flat_params import random_init
from howdah.plan.boxes import whole_piece
from howdah.plan.layout import parse_layout
from howdah.plan.method import Method
from howdah.shapes.presets import preset
from howdah.shapes.weights import weights
from howdah.verify.case import Case, small_shape
from howdah.verify.verify import verify

LLAMA = small_shape(preset("laptop"), context=16)
FORMS = {
    "llama": LLAMA,
    "gpt2": small_shape(preset("gpt2-124m"), context=16),
    "qwen3": small_shape(preset("qwen3-8b"), context=16),
    "llama3": small_shape(preset("llama3-8b"), context=16),
    "norm after": replace(LLAMA, norm_at="after"),
}
FAMILIES = {
    "bloom": small_shape(preset("bloom-560m"), context=16),
    "bert": small_shape(preset("bert-base"), context=16),
    "roberta": small_shape(preset("roberta-base"), context=16),
    "t5": replace(small_shape(preset("t5-small"), context=16), vocab=67),
    "flan": small_shape(preset("flan-t5-base"), context=16),
}
METHODS = {
    "float64": Method("float64"),
    "float64 dropout": Method("float64", dropout=0.2),
    "float64 smoothing, z-loss": Method("float64", label_smoothing=0.1, z_loss=1e-3),
    "float32": Method("float32"),
    "bf16": Method("bf16"),
    "float64 attention dropout": Method("float64", dropout=0.1, attention_dropout=0.2),
}
CASES = {
    **{f"{form} float64": (form, "float64", "single x2") for form in (*FORMS, *FAMILIES)},
    **{f"{family} bf16": (family, "bf16", "single x2") for family in FAMILIES},
    "bert float64 attention dropout": ("bert", "float64 attention dropout", "single x2"),
    **{f"llama {name}": ("llama", name, "single x2") for name in METHODS},
    "llama recompute": ("llama", "float64", "recompute=full x2"),
}
PROVED = ("proved", "comparisons", "worst of bound", "problem")
ROWS = {
    **dict.fromkeys(CASES, PROVED),
    "initial weights": ("equal",),
    "fused AdamW with grad_scale": ("apart",),
    "checkpoint": ("equal", "equal after an update", "read back"),
}


def case_of(
    layout: str, *, method: Method, form: str = "llama", device: torch.device, steps: int = 2
) -> Case:
    """A miniature whose last micro-batch is short by one sample."""
    resolved = parse_layout(layout)
    rows = 2 * resolved.replicas * (resolved.micros or 1)
    return Case(
        shape=(FORMS | FAMILIES)[form],
        layout=resolved,
        method=method,
        samples=rows - 1,
        micro=2,
        sequence=16,
        steps=steps,
        seed=3,
        device=device.type,
    )


def proved(case: Case, workers: Workers, **how: Any) -> dict[str, Any]:
    """What `verify` says, as a row."""
    verdict = verify(case, workers, controls=False, **how)
    worst = max((one.used for one in verdict.differences), default=0.0)
    return {
        "proved": verdict.proved,
        "comparisons": len(verdict.differences),
        "worst of bound": min(float(worst), 1e300),
        "problem": next(iter(verdict.problems), ""),
    }


def measure(place: Place, report: Report) -> None:
    report.measure("initial weights", partial(initial, place))
    report.measure("fused AdamW with grad_scale", partial(adamw, place))
    report.measure("checkpoint", partial(checkpoint, place))
    with Workers(1, device=place.device.type) as one:
        for name, (form, method, layout) in CASES.items():
            case = case_of(layout, method=METHODS[method], form=form, device=place.device)
            report.measure(name, partial(proved, case, one))


def initial(place: Place) -> dict[str, Any]:
    """Random weights are a hash, so every device draws the same bits."""
    equal, table = True, weights(LLAMA)
    fill = random_init(table, 7)
    for weight in table:
        piece = whole_piece(weight.name, weight.shape)
        here, there = (torch.empty(piece.elements, device=d) for d in ("cpu", place.device))
        fill(piece, here)
        fill(piece, there)
        equal = equal and torch.equal(here, there.cpu())
    return {"equal": equal}


def adamw(place: Place) -> dict[str, Any]:
    """One clipped update by the fused kernel, and by float64 on the CPU; the largest difference."""
    start, gradient = torch.randn(2, 1000, dtype=torch.float64)
    found = []
    for device, dtype, scale in ((place.device, torch.float32, 4.0), ("cpu", torch.float64, 1.0)):
        x = torch.nn.Parameter(start.to(device, dtype))
        optimizer = torch.optim.AdamW([x], lr=0.1, fused=device != "cpu" or None)
        x.grad = (gradient * scale).to(device, dtype)
        if scale != 1.0:
            optimizer.grad_scale = torch.full((), scale, device=device)
            optimizer.found_inf = torch.zeros((), device=device)
        optimizer.step()
        found.append(x.detach().cpu().double())
    return {"apart": float((found[0] - found[1]).abs().max())}


def checkpoint(place: Place) -> dict[str, Any]:
    """A snapshot beside an update; the bits on disk, on the CPU and on the device again."""
    elements = place.pick(50 << 20, 1000)
    piece, x = whole_piece("w", (elements,)), torch.randn(elements, device=place.device)
    before, snapshots = x.cpu().clone(), snapshots_of(place.device, None)
    with tempfile.TemporaryDirectory() as folder:
        saver = Saver(Path(folder), rank=0, world=1, keep=1, say=print, snapshots=snapshots)
        about = About("gpu", "single", 0, {})
        saver.save(step=1, entries=[("weight", piece, x)], about=about)
        snapshots.settle()
        x.add_(1)
        saver.wait()
        stored = open_checkpoint(step_folder(Path(folder), 1))
        back = torch.empty_like(x)
        stored.read("weight", piece, back)
        return {
            "equal": stored.verify() == [],
            "equal after an update": torch.equal(stored.tensor("weight", "w"), before),
            "read back": torch.equal(back.cpu(), before),
        }
