"""The sizes that follow from others."""

from dataclasses import replace

from howdah.shapes.shape import Experts, Latent, ModelShape, stated

SMALL = ModelShape(layers=2, width=12, heads=3, ffn_size=20, vocab=50, context=8)
LATENT = Latent(kv_rank=5, query_rank=0, qk_nope_size=4, qk_rope_size=2, v_size=3)


def test_which_blocks_have_experts():
    def blocks(**sizes):
        shape = replace(SMALL, layers=6, experts=Experts(4, 1, ffn_size=6, **sizes))
        return [layer for layer in range(6) if shape.sparse(layer)]

    assert blocks() == [0, 1, 2, 3, 4, 5]
    assert blocks(first_dense=3) == [3, 4, 5]  # DeepSeek-V3
    assert blocks(every=2) == [1, 3, 5]  # Llama 4 Maverick
    assert blocks(first_dense=1, every=2) == [2, 4]
    assert not SMALL.sparse(0)


def test_equal_models_are_equal_shapes():
    assert stated(SMALL) == stated(replace(SMALL, kv_heads=3, head_size=4)) != SMALL
    latent = replace(SMALL, latent=LATENT)
    assert stated(latent) == latent
    assert (latent.k, latent.d) == (3, 6)
