"""Named sizes: the models of the papers, and a small one for a laptop.

A preset is a `ModelShape` and nothing else: no weights, no code, no download. That is why the
presets live on the plan floor: the planner and the simulator ask for `llama3-70b` on machines
that could never build it. Where a value comes from stands beside it; a test holds every total
equal to the published number of parameters, to the last one.

Mixtures of experts are in `presets_moe.py`.
"""

from dataclasses import replace

from howdah.base.errors import UserError, nearest, shown
from howdah.shapes.presets_moe import MOE
from howdah.shapes.shape import ModelShape, RotaryScaling


def preset(name: str) -> ModelShape:
    """The sizes that `name` stands for. Raises UserError with the nearest name."""
    if name not in PRESETS:
        raise UserError(f"model.preset {shown(name)} is unknown{nearest(name, PRESETS)}")
    return PRESETS[name]


# -- families ------------------------------------------------------------------


def _gpt(
    layers: int, width: int, heads: int, *, vocab: int = 50257, context: int = 1024
) -> ModelShape:
    """GPT-2's block: learned positions, LayerNorm before, GELU, biases, tied head."""
    return ModelShape(
        layers=layers,
        width=width,
        heads=heads,
        ffn=4 * width,
        vocab=vocab,
        context=context,
        feedforward="gelu",
        norm="layernorm",
        positions="learned",
        bias=True,
        tied=True,
    )


def _megatron(layers: int, width: int, heads: int, *, context: int) -> ModelShape:
    """GPT with the vocabulary padded to 51,200, a multiple of 128 on 8 tensor-parallel ranks."""
    return _gpt(layers, width, heads, vocab=51200, context=context)


def _opt(layers: int, width: int, heads: int) -> ModelShape:
    """GPT with ReLU. Two rows of the 2050 positions stand before the first token's."""
    gpt = _gpt(layers, width, heads, vocab=50272, context=2050)
    return replace(gpt, feedforward="relu")


def _bloom(layers: int, width: int, heads: int) -> ModelShape:
    gpt = _gpt(layers, width, heads, vocab=250880, context=2048)
    return replace(gpt, positions="alibi", embedding_norm=True)


def _bert(layers: int, width: int, heads: int) -> ModelShape:
    """The masked language model: no pooler and no next-sentence head."""
    return replace(
        _gpt(layers, width, heads, vocab=30522, context=512),
        family="encoder",
        norm_at="after",
        epsilon=1e-12,
        embedding_norm=True,
        token_types=2,
        transform=True,
    )


def _t5(layers: int, width: int, heads: int, *, ffn: int, head_size: int = 64) -> ModelShape:
    """T5 1.0; as many blocks in the encoder."""
    return ModelShape(
        family="encoder-decoder",
        layers=layers,
        encoder_layers=layers,
        width=width,
        heads=heads,
        head_size=head_size,
        ffn=ffn,
        vocab=32128,
        context=512,
        feedforward="relu",
        epsilon=1e-6,
        positions="relative",
        tied=True,
    )


def _flan_t5(layers: int, width: int, heads: int, *, ffn: int) -> ModelShape:
    """T5 1.1: a gate in the feed-forward, and a head of its own."""
    return replace(_t5(layers, width, heads, ffn=ffn), feedforward="geglu", tied=False)


def _llama(
    layers: int, width: int, heads: int, *, ffn: int, kv_heads: int | None = None, context: int
) -> ModelShape:
    return ModelShape(
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        vocab=32000,
        context=context,
    )


def _llama1(layers: int, width: int, heads: int, *, ffn: int) -> ModelShape:
    return replace(_llama(layers, width, heads, ffn=ffn, context=2048), epsilon=1e-6)


def _llama2(
    layers: int, width: int, heads: int, *, ffn: int, kv_heads: int | None = None
) -> ModelShape:
    return _llama(layers, width, heads, ffn=ffn, kv_heads=kv_heads, context=4096)


def _llama3(
    layers: int, width: int, heads: int, *, ffn: int, stretch: float, tied: bool = False
) -> ModelShape:
    """Llama 3.1 and 3.2: 8 key-value heads; rotary positions of 8192, stretched for 131072."""
    return replace(
        _llama(layers, width, heads, ffn=ffn, kv_heads=8, context=131072),
        vocab=128256,
        rotary_base=500_000.0,
        rotary_scaling=RotaryScaling(stretch),
        tied=tied,
    )


def _smollm2(
    layers: int, width: int, heads: int, *, ffn: int, kv_heads: int | None = None
) -> ModelShape:
    llama = _llama(layers, width, heads, ffn=ffn, kv_heads=kv_heads, context=8192)
    return replace(llama, vocab=49152, rotary_base=100_000.0, tied=True)


def _qwen2(
    layers: int, width: int, heads: int, *, ffn: int, kv_heads: int, tied: bool = False
) -> ModelShape:
    """Qwen 2 and 2.5. The larger ones have a head of their own, and a longer vocabulary."""
    return replace(
        _llama(layers, width, heads, ffn=ffn, kv_heads=kv_heads, context=131072),
        vocab=151936 if tied else 152064,
        epsilon=1e-6,
        rotary_base=1_000_000.0,
        qkv_bias=True,
        tied=tied,
    )


def _qwen3(layers: int, width: int, heads: int, *, ffn: int, tied: bool = False) -> ModelShape:
    return replace(
        _llama(layers, width, heads, ffn=ffn, kv_heads=8, context=40960),
        head_size=128,
        vocab=151936,
        epsilon=1e-6,
        rotary_base=1_000_000.0,
        query_key_norm=True,
        tied=tied,
    )


# -- models --------------------------------------------------------------------

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
    # https://arxiv.org/abs/1909.08053, table 1: the scaling study on 1, 2, 4 and 8 GPUs
    "megatron-1.2b": _megatron(40, 1536, 16, context=1024),
    "megatron-2.5b": _megatron(54, 1920, 20, context=1024),
    "megatron-4.2b": _megatron(64, 2304, 24, context=1024),
    "megatron-8.3b": _megatron(72, 3072, 32, context=1024),
    # https://arxiv.org/abs/2104.04473, table 1
    "megatron-7.5b": _megatron(36, 4096, 32, context=2048),
    "megatron-145b": _megatron(80, 12288, 96, context=2048),
    "megatron-530b": _megatron(105, 20480, 128, context=2048),
    "megatron-1t": _megatron(128, 25600, 160, context=2048),
    # https://arxiv.org/abs/2205.01068, table 1; cards facebook/opt-125m and so on. The 175B
    # was given out on request only.
    "opt-125m": _opt(12, 768, 12),
    "opt-1.3b": _opt(24, 2048, 32),
    "opt-6.7b": _opt(32, 4096, 32),
    "opt-13b": _opt(40, 5120, 40),
    "opt-30b": _opt(48, 7168, 56),
    "opt-175b": _opt(96, 12288, 96),
    # https://arxiv.org/abs/2211.05100, table 3; cards bigscience/bloom-560m, bloom-7b1 and bloom
    "bloom-560m": _bloom(24, 1024, 16),
    "bloom-3b": _bloom(30, 2560, 32),
    "bloom-7b": _bloom(30, 4096, 32),
    "bloom-176b": _bloom(70, 14336, 112),
    # https://arxiv.org/abs/1810.04805; cards google-bert/bert-base-uncased, bert-large-uncased
    "bert-base": _bert(12, 768, 12),
    "bert-large": _bert(24, 1024, 16),
    # https://arxiv.org/abs/1910.10683, section 3.7; cards google-t5/t5-small to t5-11b
    "t5-small": _t5(6, 512, 8, ffn=2048),
    "t5-base": _t5(12, 768, 12, ffn=3072),
    "t5-large": _t5(24, 1024, 16, ffn=4096),
    "t5-3b": _t5(24, 1024, 32, ffn=16384, head_size=128),
    "t5-11b": _t5(24, 1024, 128, ffn=65536, head_size=128),
    # https://arxiv.org/abs/2210.11416; cards google/flan-t5-base, -xl and -xxl
    "flan-t5-base": _flan_t5(12, 768, 12, ffn=2048),
    "flan-t5-xl": _flan_t5(24, 2048, 32, ffn=5120),
    "flan-t5-xxl": _flan_t5(24, 4096, 64, ffn=10240),
    # https://arxiv.org/abs/2302.13971, table 2; cards huggyllama/llama-7b to llama-65b
    "llama1-7b": _llama1(32, 4096, 32, ffn=11008),
    "llama1-13b": _llama1(40, 5120, 40, ffn=13824),
    "llama1-33b": _llama1(60, 6656, 52, ffn=17920),
    "llama1-65b": replace(_llama1(80, 8192, 64, ffn=22016), epsilon=1e-5),
    # https://arxiv.org/abs/2307.09288; cards meta-llama/Llama-2-7b-hf, -13b-hf, -70b-hf
    "llama2-7b": _llama2(32, 4096, 32, ffn=11008),
    "llama2-13b": _llama2(40, 5120, 40, ffn=13824),
    "llama2-70b": _llama2(80, 8192, 64, ffn=28672, kv_heads=8),
    # cards meta-llama/Llama-3.2-1B and -3B
    "llama3-1b": _llama3(16, 2048, 32, ffn=8192, stretch=32.0, tied=True),
    "llama3-3b": _llama3(28, 3072, 24, ffn=8192, stretch=32.0, tied=True),
    # https://arxiv.org/abs/2407.21783, table 3; cards meta-llama/Llama-3.1-8B, -70B, -405B
    "llama3-8b": _llama3(32, 4096, 32, ffn=14336, stretch=8.0),
    "llama3-70b": _llama3(80, 8192, 64, ffn=28672, stretch=8.0),
    "llama3-405b": _llama3(126, 16384, 128, ffn=53248, stretch=8.0),
    # https://arxiv.org/abs/2401.02385, table 1; card TinyLlama/TinyLlama_v1.1
    "tinyllama-1.1b": _llama(22, 2048, 32, ffn=5632, kv_heads=4, context=2048),
    # https://arxiv.org/abs/2502.02737; cards HuggingFaceTB/SmolLM2-135M and -360M
    "smollm2-135m": _smollm2(30, 576, 9, ffn=1536, kv_heads=3),
    "smollm2-360m": _smollm2(32, 960, 15, ffn=2560, kv_heads=5),
    # https://arxiv.org/abs/2310.06825, table 1, as released in mistralai/Mistral-7B-Instruct-v0.2:
    # the same sizes without the sliding window
    "mistral-7b": replace(
        _llama(32, 4096, 32, ffn=14336, kv_heads=8, context=32768), rotary_base=1_000_000.0
    ),
    # https://arxiv.org/abs/2412.15115; cards Qwen/Qwen2.5-0.5B, -7B and -72B
    "qwen2.5-0.5b": replace(_qwen2(24, 896, 14, ffn=4864, kv_heads=2, tied=True), context=32768),
    "qwen2.5-7b": _qwen2(28, 3584, 28, ffn=18944, kv_heads=4),
    "qwen2.5-72b": replace(_qwen2(80, 8192, 64, ffn=29568, kv_heads=8), epsilon=1e-5),
    # https://arxiv.org/abs/2505.09388, table 1; cards Qwen/Qwen3-0.6B, -8B and -32B
    "qwen3-0.6b": _qwen3(28, 1024, 16, ffn=3072, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 32, ffn=12288),
    "qwen3-32b": _qwen3(64, 5120, 64, ffn=25600),
} | MOE
