"""T5 beside transformers: a plain loop and howdah on two layouts each.

As `test_families_beside_transformers.py`: transformers' own model, built by its own class, is
trained by torch's AdamW; howdah reads its folder and trains on the same sources and targets, which
end in padding. After three steps losses, norms and every weight must agree, in float64 to 1e-10.
"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from plain_loop import LENGTH, ROWS, assert_the_same, by_a_plain_loop

from howdah.plan.batch import MASKED
from howdah.text.batches import Micro

transformers = pytest.importorskip("transformers")

VOCAB, START = 61, 0
SIZES = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "d_kv": 6,
    "d_ff": 40,
    "num_heads": 4,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "n_positions": 32,
    "dropout_rate": 0.0,
    "pad_token_id": START,
    "decoder_start_token_id": START,
}
MODELS = {
    "t5": SIZES,
    "flan": SIZES | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
}
LAYOUTS = {
    "t5": ("dp2 tp2 sp zero3 x1", "pp2 1f1b recompute=full x2"),
    "flan": ("dp2 pp2 zero1 1f1b x2", "tp2 sp x2"),
}


def batch_of(step):
    """Sources, where they are no padding, tokens of the decoder, and labels."""
    draw = torch.Generator().manual_seed(100 + step)
    source, target = torch.randint(2, VOCAB, (2, ROWS, LENGTH), generator=draw)
    read, written = torch.randint(3, LENGTH + 1, (2, ROWS, 1), generator=draw)
    seen = (torch.arange(LENGTH) < read).long()
    labels = torch.where(torch.arange(LENGTH) < written, target, MASKED)
    tokens = F.pad(labels[:, :-1], (1, 0), value=START)
    return torch.where(seen > 0, source, START), seen, tokens.clamp(min=START), labels


def their_model(kind, dtype):
    torch.manual_seed(0)
    made = transformers.T5Config(**MODELS[kind])
    model = transformers.T5ForConditionalGeneration._from_config(made).to(dtype)
    if kind == "flan":  # transformers 5 ties what it makes
        model.lm_head.weight = torch.nn.Parameter(torch.zeros_like(model.shared.weight))
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.05 * torch.randn_like(weight))
    return model


def loss_of(model, step):
    source, seen, _, labels = batch_of(step)
    return model(source, attention_mask=seen, labels=labels).loss


def micros_of(step, plan, replica):
    given = [x.chunk(plan.layout.readers)[replica] for x in batch_of(step)]
    micros = []
    for rows in zip(*(x.split(plan.micro_batch) for x in given), strict=True):
        source, seen, tokens, labels = (x.contiguous().numpy() for x in rows)
        at = torch.arange(LENGTH).repeat(len(tokens), 1)
        one = torch.zeros_like(at).int().numpy()
        more = {"source": source, "seen": seen}
        micros.append(Micro(tokens, labels, at.numpy(), one, at[:, 0].numpy(), more))
    return micros


@pytest.mark.parametrize(
    ("kind", "precision"),
    [
        ("t5", "float64"),
        pytest.param("flan", "float64", marks=pytest.mark.slow),
        *(pytest.param(kind, "float32", marks=pytest.mark.slow) for kind in MODELS),
    ],
)
def test_three_steps_are_those_of_a_plain_loop(workers, tmp_path, kind, precision, monkeypatch):
    transformers.utils.logging.disable_progress_bar()
    model = their_model(kind, dtype := getattr(torch, precision))
    model.save_pretrained(tmp_path / "before")
    with monkeypatch.context() as patch:  # their norms are in float32 always; not while files are
        patch.setattr(torch, "float32", dtype)
        expected = by_a_plain_loop(model, partial(loss_of, model), ["relative_attention_bias"])
    model.save_pretrained(tmp_path / "after")
    assert_the_same(
        workers, tmp_path, LAYOUTS[kind], precision, micros=micros_of, expected=expected
    )
