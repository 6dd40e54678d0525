"""The model of a published run: by its stated sizes, and by its name where they leave it open."""

import re
import tomllib
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from howdah.shapes.presets import preset
from howdah.shapes.shape import Experts, ModelShape
from howdah.validation.rows import Row

PAD = 128  # Megatron pads the vocabulary to a multiple of this times tp
GPT2_WORDS = 50257
MODELS = Path(__file__).with_name("models.toml")
LISTED = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "moe_experts", "moe_topk")
SIZES = {"layers": "layers", "width": "hidden", "heads": "heads"}
HEAD_SIZES = ((r"gptoss", 64), (r"qwen3|glm4|gemma|mistralnemo", 128))
PLAIN = re.compile(r"gpt(?!oss)|bloom|mpt|opt|falcon|nemotron|bert|turing|pythia|starcoder")
PADDED = re.compile(r"megatron|nemo", re.I)


def shape_of(row: Row, notes: list[str] | None = None) -> ModelShape | str:
    """The model of a row, or in a few words why it is not known; `notes` gets what was guessed."""
    name = re.sub(r"[\s_-]+", "", row["model"].lower())
    base, row = _by_name(name), _filled(row, name)
    sizes: dict[str, Any] = {
        field: row.whole(column) for field, column in SIZES.items() if row.whole(column)
    }
    if base is None and not sizes and (billions := _billions(row, name)):
        sizes = _usual(1e9 * billions)
        (notes if notes is not None else []).append(
            f"sizes not published; those of a usual model of {billions:g}B taken"
        )
    if base is None:
        lacking = [SIZES[field] for field in ("layers", "width", "heads") if field not in sizes]
        if lacking:
            unknown = f"the model {row['model']} is not known here, and its row does not say"
            told = unknown if name else "sizes of the model not published:"
            return f"{told} {', '.join(lacking)}"
        base = _generic(row, name, sizes)
    shape = _stated(row, name, base, sizes)
    return replace(shape, vocab=_vocab(row, shape.vocab))


@cache
def _known() -> dict[str, dict[str, Any]]:
    return tomllib.loads(MODELS.read_text(encoding="utf-8"))


def _by_name(name: str) -> ModelShape | None:
    found = _known()["presets"].items()
    return next((preset(known) for words, known in found if re.search(words, name)), None)


def _billions(row: Row, name: str) -> float:
    """The parameters of a dense model by its column or its name; 0 where neither says so."""
    found = re.search(r"(?<![\d.])(\d+(?:\.\d+)?) ?b(?![a-z])", row["model"].lower())
    if row["moe_experts"] or re.search(r"\ba\d+(\.\d+)?b|\dx\d|moe", row["model"].lower()):
        return 0.0
    return row.number("params_b") or (float(found[1]) if found else 0.0)


def _usual(parameters: float) -> dict[str, Any]:
    """Layers, width and heads of 128 (in eights) of a model with so many parameters, about 100
    times as wide as it has layers: N is about 12 layers x width^2.
    """
    width = max(round((100 * parameters / 12) ** (1 / 3) / 1024), 1) * 1024
    layers = max(round(parameters / (12 * width**2)), 1)
    return {"layers": layers, "width": width, "heads": width // 128}


def _filled(row: Row, name: str) -> Row:
    """The row with the sizes that its model's name stands for, if it states none."""
    if row["layers"] or row["hidden"]:
        return row
    found = _known()["sizes"].items()
    listed = next((sizes for words, sizes in found if re.search(words, name)), ())
    sizes = dict(zip((*LISTED, "moe_ffn"), map(str, listed), strict=False))
    return Row({**row.columns, **sizes})


def _gated(row: Row, name: str) -> bool:
    return row["gated_ffn"] not in ("", "0") if row["gated_ffn"] else not PLAIN.search(name)


def _inner(width: int, *, gated: bool) -> int:
    """The usual feed-forward: 8/3 of the width with a gate, four times the width without."""
    return -(-8 * width // 3 // 256) * 256 if gated else 4 * width


def _generic(row: Row, name: str, sizes: dict[str, Any]) -> ModelShape:
    gated, words = _gated(row, name), row.arguments
    biased = not gated and not row.whole("moe_experts") and not re.search("mpt|nemotron", name)
    return ModelShape(
        **sizes,
        ffn_size=_inner(sizes["width"], gated=gated),
        vocab=GPT2_WORDS,
        context=1,
        feedforward="swiglu" if gated else "gelu",
        norm="rmsnorm" if gated else "layernorm",
        positions="rotary" if gated else "learned",
        bias=biased and "--disable-bias-linear" not in words,
        tie_embeddings=not gated
        and "--untie-embeddings-and-output-weights" not in words
        and "nemotron" not in name,
    )


def _stated(row: Row, name: str, base: ModelShape, sizes: dict[str, Any]) -> ModelShape:
    """The base with the sizes of the row in place of its own."""
    shape = replace(base, **sizes, context=max(row.whole("seq", 1), 1), rope_scaling=None)
    heads_as_base = (shape.heads, shape.width) == (base.heads, base.width)
    if shape.latent is None:
        kv_heads = row.whole("kv_heads") or (base.k if heads_as_base else shape.heads)
        size = base.head_size
        if not heads_as_base or size is None:
            size = next((one for words, one in HEAD_SIZES if re.search(words, name)), None)
        if size is None and shape.width % shape.heads:
            size = -(-shape.width // shape.heads // 8) * 8
        shape = replace(shape, kv_heads=kv_heads, head_size=size)
    experts = _experts(row, base)
    gated = _gated(row, name) if row["gated_ffn"] else base.gated
    ffn = row.whole("ffn") or (base.ffn_size if shape.width == base.width else 0)
    if not ffn or (experts and not base.experts and not row["ffn"]):
        ffn = experts.ffn_size if experts else _inner(shape.width, gated=gated)
    form = base.feedforward if gated == base.gated else "swiglu" if gated else "gelu"
    bias = shape.bias and experts is None
    return replace(shape, experts=experts, ffn_size=ffn, feedforward=form, bias=bias)


def _experts(row: Row, base: ModelShape) -> Experts | None:
    count, known = row.whole("moe_experts"), base.experts
    if count <= 1:
        return known
    chosen = row.whole("moe_topk") or (known.top_k if known else 2)
    size = row.whole("moe_ffn") or row.whole("ffn") or (known.ffn_size if known else base.ffn_size)
    if known:
        return replace(known, count=count, top_k=min(chosen, count), ffn_size=size)
    return Experts(count, min(chosen, count), size)


def _vocab(row: Row, usual: int) -> int:
    words = row.whole("vocab") or usual
    if not PADDED.search(row["framework"]):
        return words
    step = PAD * max(row.whole("tp", 1), 1)
    return -(-words // step) * step
