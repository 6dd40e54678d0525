"""Random models of every family: what the property tests of sizes and weights draw from."""

from hypothesis import assume
from hypothesis import strategies as st

from howdah.shapes.check import check_shape
from howdah.shapes.shape import Experts, Latent, ModelShape

small, size, some = st.integers(1, 3), st.integers(2, 9), st.booleans()

latents = st.builds(
    Latent,
    kv_rank=size,
    query_rank=st.integers(0, 4),
    qk_nope_size=size,
    qk_rope_size=st.just(2),
    v_size=size,
)
mixtures = st.builds(
    Experts,
    count=st.integers(1, 7),
    top_k=st.integers(1, 3),
    ffn_size=size,
    shared=st.integers(0, 4),
    first_dense=st.integers(0, 2),
    every=small,
)


@st.composite
def shapes(draw):
    """A small model with any choice of every field that `check_shape` finds nothing wrong with."""
    family = draw(st.sampled_from(["decoder", "encoder", "encoder-decoder"]))
    latent = draw(st.none() | latents) if family == "decoder" else None
    experts = draw(st.none() | mixtures) if family != "encoder-decoder" else None
    bias = draw(st.sampled_from(["none", "qkv", "all"])) if latent is None else "none"
    kv_heads = draw(small)
    positions = draw(st.sampled_from(["rotary", "learned", "relative", "alibi"]))
    shape = ModelShape(
        family=family,
        layers=draw(st.integers(1, 5)),
        encoder_layers=draw(small) if family == "encoder-decoder" else 0,
        width=draw(size),
        heads=kv_heads * draw(small),
        kv_heads=None if latent else kv_heads,
        head_size=None if latent else draw(st.sampled_from([2, 4, 6])),
        ffn_size=draw(size),
        vocab=draw(st.integers(2, 30)),
        context=draw(size),
        feedforward=draw(st.sampled_from(["swiglu", "geglu", "gelu", "relu"])),
        norm=draw(st.sampled_from(["rmsnorm", "layernorm"])),
        norm_at=draw(st.sampled_from(["before", "after"])),
        positions=positions if latent is None else "rotary",
        bias=bias == "all" and experts is None,
        qkv_bias=bias == "qkv",
        tie_embeddings=draw(some),
        qk_norm=draw(some) and latent is None,
        embedding_norm=draw(some),
        token_types=draw(st.integers(0, 2)),
        transform=draw(some),
        latent=latent,
        experts=experts,
        relative_buckets=draw(size),
    )
    assume(not check_shape(shape))
    return shape
