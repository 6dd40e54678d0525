"""Named sizes: the models of the papers, and a small one for a laptop.

A preset is a `ModelShape` and nothing else: no weights, no code, no download. The planner and the
simulator ask for `llama3-70b` on machines that could never build it. A family is a `ModelShape`
with what its members share filled in; a member gives its layers, width, heads and ffn, in this
order, and what is its own. The source of the sizes is above each group; a test holds every total
equal to the published number of parameters, to the last one.

    mixture of experts  experts  chosen  shared   dense blocks     total   active
    mixtral-8x7b              8       2       -              -     46.7B    12.9B
    qwen3-30b-a3b           128       8       -              -     30.5B     3.4B
    deepseek-v3             256       8     one    the first 3    671.0B    37.6B
    llama4-maverick         128       1     one   every second    400.7B    17.2B

All experts must be stored, but a token pays for the chosen ones: memory follows the total, and
compute the active parameters.
"""

from functools import partial

from howdah.base.errors import UserError, nearest, shown
from howdah.shapes.shape import Experts, Latent, ModelShape, RopeScaling


def preset(name: str) -> ModelShape:
    """The sizes that `name` stands for. Raises UserError with the nearest name."""
    if name not in PRESETS:
        raise UserError(f"model.preset {shown(name)} is unknown{nearest(name, PRESETS)}")
    return PRESETS[name]


# -- families ------------------------------------------------------------------

# GPT-2's block: learned positions, LayerNorm before, GELU, biases, tied head
_gpt = partial(
    ModelShape,
    vocab=50257,
    context=1024,
    feedforward="gelu",
    norm="layernorm",
    positions="learned",
    bias=True,
    tie_embeddings=True,
)
# The vocabulary is padded to a multiple of 128 on 8 tensor-parallel ranks.
_megatron = partial(_gpt, vocab=51200)
# Two rows of the 2050 positions stand before the first token's.
_opt = partial(_gpt, vocab=50272, context=2050, feedforward="relu")
_bloom = partial(_gpt, vocab=250880, context=2048, positions="alibi", embedding_norm=True)
# The masked language model: no pooler and no next-sentence head
_bert = partial(
    _gpt,
    vocab=30522,
    context=512,
    family="encoder",
    feedforward="gelu_exact",
    norm_at="after",
    norm_eps=1e-12,
    embedding_norm=True,
    token_types=2,
    transform=True,
)
_roberta = partial(_bert, vocab=50265, context=512, first_position=2, token_types=1, norm_eps=1e-5)
# T5 1.0
_t5 = partial(
    ModelShape,
    family="encoder-decoder",
    vocab=32128,
    context=512,
    head_size=64,
    feedforward="relu",
    norm_eps=1e-6,
    positions="relative",
    tie_embeddings=True,
)
# T5 1.1: a gate in the feed-forward, and a head of its own
_flan_t5 = partial(_t5, feedforward="geglu", tie_embeddings=False)

_llama1 = partial(ModelShape, vocab=32000, context=2048, norm_eps=1e-6)
_llama2 = partial(ModelShape, vocab=32000, context=4096)
# Llama 3.1 and 3.2: rotary positions of 8192, stretched for 131072
_llama3 = partial(
    ModelShape,
    kv_heads=8,
    vocab=128256,
    context=131072,
    rope_theta=500_000.0,
    rope_scaling=RopeScaling(8.0),
)
# The text part. Chunked attention and layers without positions change no size.
_llama4 = partial(ModelShape, kv_heads=8, vocab=202048, rope_theta=500_000.0)
_smollm2 = partial(ModelShape, vocab=49152, context=8192, rope_theta=100_000.0, tie_embeddings=True)
_mistral = partial(ModelShape, kv_heads=8, vocab=32000, context=32768, rope_theta=1_000_000.0)
# Qwen 2 and 2.5; the small ones have a shorter vocabulary and context, and a tied head
_qwen2 = partial(
    ModelShape,
    vocab=152064,
    context=131072,
    norm_eps=1e-6,
    rope_theta=1_000_000.0,
    qkv_bias=True,
)
_qwen3 = partial(
    ModelShape,
    kv_heads=8,
    head_size=128,
    vocab=151936,
    context=40960,
    norm_eps=1e-6,
    rope_theta=1_000_000.0,
    qk_norm=True,
)
# Latent attention, shared experts, a context stretched by YaRN.
_yarn = partial(RopeScaling, 40.0, 1.0, 32.0, 4096, kind="yarn")
_latent = partial(Latent, kv_rank=512, qk_nope_size=128, qk_rope_size=64, v_size=128)
_deepseek = partial(
    ModelShape,
    vocab=102400,
    context=163840,
    norm_eps=1e-6,
    latent=_latent(query_rank=1536),
    rope_scaling=_yarn(mscale=1.0, mscale_all_dim=1.0),
)
_deepseek_lite = partial(
    _deepseek,
    latent=_latent(query_rank=0),
    rope_scaling=_yarn(mscale=0.707, mscale_all_dim=0.707),
)
_deepseek_experts = partial(Experts, normalise=False)
_llama4_experts = partial(Experts, top_k=1, normalise=False, scores="input-sigmoid")

# -- models --------------------------------------------------------------------

PRESETS: dict[str, ModelShape] = {
    # 3.8M parameters: trains in minutes on two cores. Few wide layers and heads of 64, because on
    # a CPU six layers of 192 with heads of 32 are a tenth slower with fewer parameters.
    "laptop": ModelShape(4, 256, 4, 640, kv_heads=2, vocab=4096, context=256, tie_embeddings=True),
    # Radford et al. 2019, table 2; the released models, cards openai-community/gpt2, gpt2-medium,
    # gpt2-large and gpt2-xl (the paper's own counts are known to be too small)
    "gpt2-124m": _gpt(12, 768, 12, 3072),
    "gpt2-355m": _gpt(24, 1024, 16, 4096),
    "gpt2-774m": _gpt(36, 1280, 20, 5120),
    "gpt2-1.5b": _gpt(48, 1600, 25, 6400),
    # https://arxiv.org/abs/2005.14165, table 2.1. Every second layer of the original has banded
    # sparse attention; the sizes are the same.
    "gpt3-175b": _gpt(96, 12288, 96, 49152, context=2048),
    # https://arxiv.org/abs/1909.08053, table 1: the scaling study on 1, 2, 4 and 8 GPUs
    "megatron-1.2b": _megatron(40, 1536, 16, 6144),
    "megatron-2.5b": _megatron(54, 1920, 20, 7680),
    "megatron-4.2b": _megatron(64, 2304, 24, 9216),
    "megatron-8.3b": _megatron(72, 3072, 32, 12288),
    # https://arxiv.org/abs/2104.04473, table 1
    "megatron-7.5b": _megatron(36, 4096, 32, 16384, context=2048),
    "megatron-145b": _megatron(80, 12288, 96, 49152, context=2048),
    "megatron-530b": _megatron(105, 20480, 128, 81920, context=2048),
    "megatron-1t": _megatron(128, 25600, 160, 102400, context=2048),
    # https://arxiv.org/abs/2205.01068, table 1; cards facebook/opt-125m and so on. The 175B
    # was given out on request only.
    "opt-125m": _opt(12, 768, 12, 3072),
    "opt-1.3b": _opt(24, 2048, 32, 8192),
    "opt-6.7b": _opt(32, 4096, 32, 16384),
    "opt-13b": _opt(40, 5120, 40, 20480),
    "opt-30b": _opt(48, 7168, 56, 28672),
    "opt-175b": _opt(96, 12288, 96, 49152),
    # https://arxiv.org/abs/2211.05100, table 3; cards bigscience/bloom-560m, bloom-7b1 and bloom
    "bloom-560m": _bloom(24, 1024, 16, 4096),
    "bloom-3b": _bloom(30, 2560, 32, 10240),
    "bloom-7b": _bloom(30, 4096, 32, 16384),
    "bloom-176b": _bloom(70, 14336, 112, 57344),
    # https://arxiv.org/abs/1810.04805; cards google-bert/bert-base-uncased, bert-large-uncased
    "bert-base": _bert(12, 768, 12, 3072),
    "bert-large": _bert(24, 1024, 16, 4096),
    # https://arxiv.org/abs/1907.11692; cards FacebookAI/roberta-base, roberta-large
    "roberta-base": _roberta(12, 768, 12, 3072),
    "roberta-large": _roberta(24, 1024, 16, 4096),
    # https://arxiv.org/abs/1910.10683, section 3.7; cards google-t5/t5-small to t5-11b
    "t5-small": _t5(6, 512, 8, 2048, encoder_layers=6),
    "t5-base": _t5(12, 768, 12, 3072, encoder_layers=12),
    "t5-large": _t5(24, 1024, 16, 4096, encoder_layers=24),
    "t5-3b": _t5(24, 1024, 32, 16384, encoder_layers=24, head_size=128),
    "t5-11b": _t5(24, 1024, 128, 65536, encoder_layers=24, head_size=128),
    # https://arxiv.org/abs/2210.11416; cards google/flan-t5-small, -base, -large, -xl and -xxl
    "flan-t5-small": _flan_t5(8, 512, 6, 1024, encoder_layers=8),
    "flan-t5-base": _flan_t5(12, 768, 12, 2048, encoder_layers=12),
    "flan-t5-large": _flan_t5(24, 1024, 16, 2816, encoder_layers=24),
    "flan-t5-xl": _flan_t5(24, 2048, 32, 5120, encoder_layers=24),
    "flan-t5-xxl": _flan_t5(24, 4096, 64, 10240, encoder_layers=24),
    # https://arxiv.org/abs/2302.13971, table 2; cards huggyllama/llama-7b to llama-65b
    "llama1-7b": _llama1(32, 4096, 32, 11008),
    "llama1-13b": _llama1(40, 5120, 40, 13824),
    "llama1-33b": _llama1(60, 6656, 52, 17920),
    "llama1-65b": _llama1(80, 8192, 64, 22016, norm_eps=1e-5),
    # https://arxiv.org/abs/2307.09288; cards meta-llama/Llama-2-7b-hf, -13b-hf, -70b-hf
    "llama2-7b": _llama2(32, 4096, 32, 11008),
    "llama2-13b": _llama2(40, 5120, 40, 13824),
    "llama2-70b": _llama2(80, 8192, 64, 28672, kv_heads=8),
    # cards meta-llama/Llama-3.2-1B and -3B
    "llama3-1b": _llama3(16, 2048, 32, 8192, rope_scaling=RopeScaling(32.0), tie_embeddings=True),
    "llama3-3b": _llama3(28, 3072, 24, 8192, rope_scaling=RopeScaling(32.0), tie_embeddings=True),
    # https://arxiv.org/abs/2407.21783, table 3; cards meta-llama/Llama-3.1-8B, -70B, -405B
    "llama3-8b": _llama3(32, 4096, 32, 14336),
    "llama3-70b": _llama3(80, 8192, 64, 28672),
    "llama3-405b": _llama3(126, 16384, 128, 53248),
    # https://arxiv.org/abs/2401.02385, table 1; card TinyLlama/TinyLlama_v1.1
    "tinyllama-1.1b": _llama2(22, 2048, 32, 5632, kv_heads=4, context=2048),
    # https://arxiv.org/abs/2502.02737; cards HuggingFaceTB/SmolLM2-135M and -360M
    "smollm2-135m": _smollm2(30, 576, 9, 1536, kv_heads=3),
    "smollm2-360m": _smollm2(32, 960, 15, 2560, kv_heads=5),
    # https://arxiv.org/abs/2310.06825, table 1, as released in mistralai/Mistral-7B-Instruct-v0.2:
    # the same sizes without the sliding window
    "mistral-7b": _mistral(32, 4096, 32, 14336),
    # https://arxiv.org/abs/2412.15115; cards Qwen/Qwen2.5-0.5B, -7B and -72B
    "qwen2.5-0.5b": _qwen2(
        24, 896, 14, 4864, kv_heads=2, vocab=151936, context=32768, tie_embeddings=True
    ),
    "qwen2.5-7b": _qwen2(28, 3584, 28, 18944, kv_heads=4),
    "qwen2.5-72b": _qwen2(80, 8192, 64, 29568, kv_heads=8, norm_eps=1e-5),
    # card Qwen/Qwen1.5-MoE-A2.7B
    "qwen1.5-moe-a2.7b": _qwen2(
        24,
        2048,
        16,
        5632,
        vocab=151936,
        context=8192,
        experts=Experts(60, 4, 1408, shared=5632, normalise=False, shared_gate=True),
    ),
    # https://arxiv.org/abs/2505.09388, table 1; cards Qwen/Qwen3-0.6B, -8B and -32B
    "qwen3-0.6b": _qwen3(28, 1024, 16, 3072, tie_embeddings=True),
    "qwen3-8b": _qwen3(36, 4096, 32, 12288),
    "qwen3-32b": _qwen3(64, 5120, 64, 25600),
    # https://arxiv.org/abs/2401.04088, table 1; cards mistralai/Mixtral-8x7B-v0.1 and
    # mistral-community/Mixtral-8x22B-v0.1. An expert is as wide as a dense feed-forward.
    "mixtral-8x7b": _mistral(32, 4096, 32, 14336, experts=Experts(8, 2, 14336)),
    "mixtral-8x22b": _mistral(56, 6144, 48, 16384, context=65536, experts=Experts(8, 2, 16384)),
    # https://arxiv.org/abs/2505.09388, table 2; cards Qwen/Qwen3-30B-A3B and Qwen3-235B-A22B. No
    # block has the dense feed-forward that is stated.
    "qwen3-30b-a3b": _qwen3(48, 2048, 32, 6144, kv_heads=4, experts=Experts(128, 8, 768)),
    "qwen3-235b-a22b": _qwen3(94, 4096, 64, 12288, kv_heads=4, experts=Experts(128, 8, 1536)),
    # https://arxiv.org/abs/2405.04434, section 3.1.2 and appendix B; cards
    # deepseek-ai/DeepSeek-V2-Lite and DeepSeek-V2
    "deepseek-v2-lite": _deepseek_lite(
        27, 2048, 16, 10944, experts=_deepseek_experts(64, 6, 1408, shared=2816, first_dense=1)
    ),
    "deepseek-v2": _deepseek(
        60,
        5120,
        128,
        12288,
        experts=_deepseek_experts(
            160, 6, 1536, shared=3072, first_dense=1, scale=16.0, groups=8, top_groups=3
        ),
    ),
    # https://arxiv.org/abs/2412.19437, section 4.2; card deepseek-ai/DeepSeek-V3. The main model:
    # without the module that predicts a second token (14B), and without the 256 numbers of each
    # router that balance the load, because a rule moves those and not a gradient.
    "deepseek-v3": _deepseek(
        61,
        7168,
        128,
        18432,
        vocab=129280,
        experts=_deepseek_experts(
            256,
            8,
            2048,
            shared=2048,
            first_dense=3,
            scores="sigmoid",
            normalise=True,
            scale=2.5,
            groups=8,
            top_groups=4,
            group_best=2,
            bias=True,
        ),
    ),
    # cards meta-llama/Llama-4-Scout-17B-16E and Llama-4-Maverick-17B-128E
    "llama4-scout": _llama4(
        48,
        5120,
        40,
        16384,
        context=10_485_760,
        experts=_llama4_experts(16, ffn_size=8192, shared=8192),
    ),
    "llama4-maverick": _llama4(
        48,
        5120,
        40,
        16384,
        context=1_048_576,
        experts=_llama4_experts(128, ffn_size=8192, shared=8192, every=2),
    ),
}
