"""Named sizes of mixtures of experts; `presets.py` has the dense models and says more.

    model            experts  chosen  shared   dense blocks     total   active
    mixtral-8x7b           8       2       -              -     46.7B    12.9B
    qwen3-30b-a3b        128       8       -              -     30.5B     3.4B
    deepseek-v3          256       8     one    the first 3    671.0B    37.6B
    llama4-maverick      128       1     one   every second    400.7B    17.2B

All experts must be stored, but a token pays for the chosen ones: memory follows the total, and
compute the active parameters.
"""

from dataclasses import replace

from howdah.shapes.shape import Experts, Latent, ModelShape


def _mixtral(layers: int, width: int, heads: int, *, ffn: int, context: int) -> ModelShape:
    """Every block has eight experts, each as wide as a dense feed-forward; two are chosen."""
    return ModelShape(
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=8,
        ffn=ffn,
        vocab=32000,
        context=context,
        rotary_base=1_000_000.0,
        experts=Experts(8, 2, ffn=ffn),
    )


def _qwen3(layers: int, width: int, heads: int, *, ffn: int, expert_ffn: int) -> ModelShape:
    """128 narrow experts, eight chosen. No block has the dense feed-forward that `ffn` states."""
    return ModelShape(
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=4,
        head_size=128,
        ffn=ffn,
        vocab=151936,
        context=40960,
        epsilon=1e-6,
        rotary_base=1_000_000.0,
        query_key_norm=True,
        experts=Experts(128, 8, ffn=expert_ffn),
    )


def _deepseek(
    layers: int, width: int, heads: int, *, ffn: int, query_rank: int, experts: Experts
) -> ModelShape:
    """Latent attention, shared experts. YaRN, which stretches the context, is not described."""
    return ModelShape(
        layers=layers,
        width=width,
        heads=heads,
        ffn=ffn,
        vocab=102400,
        context=163840,
        epsilon=1e-6,
        latent=Latent(512, query_rank, plain=128, rotary=64, value=128),
        experts=experts,
    )


def _llama4(*, context: int, experts: Experts) -> ModelShape:
    """The text part. Chunked attention and layers without positions change no size."""
    return ModelShape(
        layers=48,
        width=5120,
        heads=40,
        kv_heads=8,
        ffn=16384,
        vocab=202048,
        context=context,
        rotary_base=500_000.0,
        experts=experts,
    )


MOE: dict[str, ModelShape] = {
    # https://arxiv.org/abs/2401.04088, table 1; cards mistralai/Mixtral-8x7B-v0.1 and
    # mistral-community/Mixtral-8x22B-v0.1
    "mixtral-8x7b": _mixtral(32, 4096, 32, ffn=14336, context=32768),
    "mixtral-8x22b": _mixtral(56, 6144, 48, ffn=16384, context=65536),
    # https://arxiv.org/abs/2505.09388, table 2; cards Qwen/Qwen3-30B-A3B and Qwen3-235B-A22B
    "qwen3-30b-a3b": _qwen3(48, 2048, 32, ffn=6144, expert_ffn=768),
    "qwen3-235b-a22b": _qwen3(94, 4096, 64, ffn=12288, expert_ffn=1536),
    # https://arxiv.org/abs/2405.04434, section 3.1.2 and appendix B; cards
    # deepseek-ai/DeepSeek-V2-Lite and DeepSeek-V2
    "deepseek-v2-lite": _deepseek(
        27, 2048, 16, ffn=10944, query_rank=0, experts=Experts(64, 6, 1408, shared=2816, first=1)
    ),
    "deepseek-v2": _deepseek(
        60,
        5120,
        128,
        ffn=12288,
        query_rank=1536,
        experts=Experts(160, 6, 1536, shared=3072, first=1),
    ),
    # https://arxiv.org/abs/2412.19437, section 4.2; card deepseek-ai/DeepSeek-V3. The main model:
    # without the module that predicts a second token (14B), and without the 256 numbers of each
    # router that balance the load, because a rule moves those and not a gradient.
    "deepseek-v3": replace(
        _deepseek(
            61,
            7168,
            128,
            ffn=18432,
            query_rank=1536,
            experts=Experts(256, 8, 2048, shared=2048, first=3),
        ),
        vocab=129280,
    ),
    # cards meta-llama/Llama-4-Scout-17B-16E and Llama-4-Maverick-17B-128E
    "llama4-scout": _llama4(context=10_485_760, experts=Experts(16, 1, ffn=8192, shared=8192)),
    "llama4-maverick": _llama4(
        context=1_048_576, experts=Experts(128, 1, ffn=8192, shared=8192, every=2)
    ),
}
