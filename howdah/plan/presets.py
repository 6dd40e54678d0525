"""Named sizes: the models of the papers, and a small one for a laptop.

A preset is a `ModelShape` and nothing else: no weights, no code, no download. That is why the
presets live on the plan floor: the planner and the simulator ask for `llama3-70b` on machines
that could never build it. Where a value comes from stands beside it; a test holds every total
equal to the published number of parameters, to the last one.
"""

from howdah.plan.problems import BadInput, nearest
from howdah.plan.shapes import ModelShape, RotaryScaling


def preset(name: str) -> ModelShape:
    """The sizes that `name` stands for. Raises BadInput with the nearest name."""
    if name not in PRESETS:
        raise BadInput(f"model.preset {name!r} is unknown{nearest(name, PRESETS)}")
    return PRESETS[name]


def _gpt(layers: int, width: int, heads: int, *, context: int = 1024) -> ModelShape:
    """GPT-2's block: learned positions, LayerNorm before, GELU, biases, tied head."""
    return ModelShape(
        layers=layers,
        width=width,
        heads=heads,
        ffn=4 * width,
        vocab=50257,
        context=context,
        feedforward="gelu",
        norm="layernorm",
        positions="learned",
        bias=True,
        tied=True,
    )


def _llama2(
    layers: int, width: int, heads: int, ffn: int, *, kv_heads: int | None = None
) -> ModelShape:
    return ModelShape(
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        vocab=32000,
        context=4096,
    )


def _llama3(
    layers: int, width: int, heads: int, *, ffn: int, stretch: float, tied: bool = False
) -> ModelShape:
    """Llama 3.1 and 3.2: 8 key-value heads; rotary positions of 8192, stretched for 131072."""
    return ModelShape(
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=8,
        ffn=ffn,
        vocab=128256,
        context=131072,
        rotary_base=500_000.0,
        rotary_scaling=RotaryScaling(stretch),
        tied=tied,
    )


PRESETS: dict[str, ModelShape] = {
    # 3.8M parameters: trains in minutes on two cores. Few wide layers and heads of 64, because on
    # a CPU six layers of 192 with heads of 32 are a tenth slower with fewer parameters.
    "laptop": ModelShape(
        layers=4,
        width=256,
        heads=4,
        kv_heads=2,
        ffn=640,
        vocab=4096,
        context=256,
        tied=True,
    ),
    # Radford et al. 2019, table 2; the released models, cards openai-community/gpt2, gpt2-medium,
    # gpt2-large and gpt2-xl (the paper's own counts are known to be too small)
    "gpt2-124m": _gpt(12, 768, 12),
    "gpt2-355m": _gpt(24, 1024, 16),
    "gpt2-774m": _gpt(36, 1280, 20),
    "gpt2-1.5b": _gpt(48, 1600, 25),
    # https://arxiv.org/abs/2005.14165, table 2.1. Every second layer of the original has banded
    # sparse attention; the sizes are the same.
    "gpt3-175b": _gpt(96, 12288, 96, context=2048),
    # https://arxiv.org/abs/2307.09288; cards meta-llama/Llama-2-7b-hf, -13b-hf, -70b-hf
    "llama2-7b": _llama2(32, 4096, 32, 11008),
    "llama2-13b": _llama2(40, 5120, 40, 13824),
    "llama2-70b": _llama2(80, 8192, 64, 28672, kv_heads=8),
    # card meta-llama/Llama-3.2-1B
    "llama3-1b": _llama3(16, 2048, 32, ffn=8192, stretch=32.0, tied=True),
    # https://arxiv.org/abs/2407.21783, table 3; cards meta-llama/Llama-3.1-8B, -70B, -405B
    "llama3-8b": _llama3(32, 4096, 32, ffn=14336, stretch=8.0),
    "llama3-70b": _llama3(80, 8192, 64, ffn=28672, stretch=8.0),
    "llama3-405b": _llama3(126, 16384, 128, ffn=53248, stretch=8.0),
    # https://arxiv.org/abs/2505.09388, table 1; card Qwen/Qwen3-8B
    "qwen3-8b": ModelShape(
        layers=36,
        width=4096,
        heads=32,
        kv_heads=8,
        head_size=128,
        ffn=12288,
        vocab=151936,
        context=40960,
        epsilon=1e-6,
        rotary_base=1_000_000.0,
        query_key_norm=True,
    ),
}
