"""BLOOM, BERT and RoBERTa beside transformers: a plain loop and howdah on two layouts each.

transformers' own model, built by its own class with random weights, is trained by torch's AdamW.
howdah reads the weights from its folder and trains on the same tokens. After three steps losses and
norms must agree, and so must every weight; in float64 to 1e-10, for which transformers' float32
computations are made to be float64. The loop uses nothing of howdah's model, losses, clipping or
optimizer. Of an encoder, rows end in padding, and some tokens have labels.
"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from plain_loop import LENGTH, ROWS, assert_the_same, by_a_plain_loop

from howdah.plan.batch import MASKED
from howdah.text.batches import Micro

transformers = pytest.importorskip("transformers")

VOCAB = 61
BERT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
MODELS = {
    "bloom": {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4, "seq_length": 32},
    "bert": BERT | {"pad_token_id": None},
    "roberta": BERT | {"type_vocab_size": 1, "pad_token_id": 1},
}
LAYOUTS = {
    "bloom": ("dp2 tp2 sp zero3 x1", "pp2 1f1b recompute=full x2"),
    "bert": ("dp2 pp2 zero1 1f1b x2", "tp2 sp x2"),
    "roberta": ("tp2 dp2 zero2 x1", "pp2 1f1b x2"),
}


def batch_of(step, kind):
    """Tokens, labels, token types and how many tokens of each row are no padding."""
    draw = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(4, VOCAB, (ROWS, LENGTH + 1), generator=draw)
    if kind == "bloom":
        return tokens[:, :-1], tokens[:, 1:], None, torch.full((ROWS,), LENGTH)
    sizes = torch.randint(5, LENGTH + 1, (ROWS,), generator=draw)
    inside = torch.arange(LENGTH) < sizes[:, None]
    tokens = torch.where(inside, tokens[:, :-1], 1)
    hidden = inside & (torch.rand(ROWS, LENGTH, generator=draw) < 0.4)
    labels = torch.where(hidden, tokens, MASKED)
    types = (torch.arange(LENGTH) > 4).long().expand(ROWS, LENGTH)
    types = types if kind == "bert" else torch.zeros_like(types)
    return torch.where(hidden, 3, tokens), labels, types, sizes


@pytest.fixture
def widened(monkeypatch):
    """transformers computes softmax and slopes in float32 always; here that means float64. And its
    constant of BLOOM's GELU has 8 digits.
    """
    for name in ("float", "float32"):
        monkeypatch.setattr(torch, name, torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    bloom, tanh = transformers.models.bloom.modeling_bloom, {"approximate": "tanh"}
    monkeypatch.setattr(bloom, "bloom_gelu_forward", partial(F.gelu, **tanh))
    monkeypatch.setattr(
        bloom,
        "bloom_gelu_back",
        lambda grad, saved: torch.ops.aten.gelu_backward(grad, saved[0], **tanh),
    )


def their_model(kind, dtype):
    torch.manual_seed(0)
    made = transformers.AutoConfig.for_model(kind, **MODELS[kind])
    auto = "AutoModelForCausalLM" if kind == "bloom" else "AutoModelForMaskedLM"
    model = getattr(transformers, auto).from_config(made, attn_implementation="eager").to(dtype)
    with torch.no_grad():
        for weight in model.parameters():  # biases too, which begin as zero
            weight.add_(0.05 * torch.randn_like(weight))
    return model


def loss_of(model, kind, step):
    tokens, labels, types, sizes = batch_of(step, kind)
    inside = (torch.arange(LENGTH) < sizes[:, None]).long()
    more = {} if types is None else {"token_type_ids": types}
    logits = model(tokens, attention_mask=inside, **more).logits
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=MASKED)


def micros_of(kind, step, plan, replica):
    given = [x.chunk(plan.layout.readers)[replica] for x in batch_of(step, kind) if x is not None]
    micros = []
    for rows in zip(*(x.split(plan.micro_batch) for x in given), strict=True):
        tokens, labels, *types, sizes = rows
        at = torch.arange(LENGTH).expand(len(tokens), LENGTH)
        documents = (at >= sizes[:, None]).int()  # padding is a document of its own
        arrays = (x.contiguous().numpy() for x in (tokens, labels, at, documents))
        more = {"token_types": types[0].contiguous().numpy()} if types else {}
        micros.append(Micro(*arrays, torch.arange(len(tokens)).numpy(), more))
    return micros


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("kind", "precision"),
    [
        ("bloom", "float64"),
        ("bert", "float64"),
        pytest.param("roberta", "float64", marks=pytest.mark.slow),
        *(pytest.param(kind, "float32", marks=pytest.mark.slow) for kind in MODELS),
    ],
)
def test_three_steps_are_those_of_a_plain_loop(workers, tmp_path, kind, precision, request):
    transformers.utils.logging.disable_progress_bar()
    if precision == "float64":
        request.getfixturevalue("widened")
    model = their_model(kind, getattr(torch, precision))
    model.save_pretrained(tmp_path / "before")
    tables = ("position_embeddings", "token_type_embeddings")
    expected = by_a_plain_loop(model, partial(loss_of, model, kind), tables)
    model.save_pretrained(tmp_path / "after")
    micros = partial(micros_of, kind)
    assert_the_same(workers, tmp_path, LAYOUTS[kind], precision, micros=micros, expected=expected)
