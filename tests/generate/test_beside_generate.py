"""Greedy texts, penalties and beams, token by token those of transformers' generate.

transformers' own model, built by its own class with random weights, is saved and read by howdah.
Both compute in float64, so that no near-tie is decided by the last digit of a sum.
"""

import pytest
import torch
from their_texts import BEAMS, PROMPTS, VOCAB, assert_beams_agree, assert_greedy_texts_agree

from howdah.generate.predictor import OneDevice
from howdah.model.hub import read_hub
from howdah.train.resume import read_folder
from howdah.train.whole_model import loaded_model

transformers = pytest.importorskip("transformers")

DENSE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
MODELS = {
    "gpt2": {
        "vocab_size": VOCAB,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 32,
        "initializer_range": 0.3,
    },
    "llama": DENSE,
    "mistral": DENSE | {"sliding_window": 24, "max_position_embeddings": 64},
    "bloom": {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "n_layer": 2,
        "n_head": 4,
        "seq_length": 32,
        "initializer_range": 0.3,
    },
    "mixtral": DENSE | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": DENSE | LATENT,
}
QUICK = ("gpt2",)
EACH = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]


@pytest.fixture(scope="module", params=EACH)
def both(request, tmp_path_factory):
    """Their model and ours, of the same weights in float64."""
    torch.manual_seed(0)
    ends = {"bos_token_id": None, "eos_token_id": None}  # of a text; a test gives its own
    config = transformers.AutoConfig.for_model(request.param, **MODELS[request.param], **ends)
    config._experts_implementation = "eager"  # the other takes no float64
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval().double()
    folder = tmp_path_factory.mktemp(request.param)
    theirs.save_pretrained(folder)
    shape, _ = read_hub(folder)
    fill = read_folder(folder, shape)
    ours = loaded_model(fill, shape, dtype=torch.float64, device=torch.device("cpu"))
    return theirs, OneDevice(ours)


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_greedy_texts_are_those_of_generate(both, penalty):
    theirs, ours = both
    assert_greedy_texts_agree(theirs, lambda: ours, PROMPTS, penalty)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("beams", BEAMS, ids=str)
def test_beams_are_those_of_generate(both, beams):
    theirs, ours = both
    assert_beams_agree(theirs, lambda: ours, PROMPTS, beams)
