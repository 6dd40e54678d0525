"""`howdah.pipeline` with a layout: what processes with parts of a model find is what one finds."""

from contextlib import closing

import pytest
import torch
from their_folders import ENCODER, bert, gpt2, save, t5, word_pieces

import howdah
from howdah.base.errors import UserError

transformers = pytest.importorskip("transformers")

TEXTS = ["the 3 cats", "a dog ran home. said file"]
GREEDY = {"do_sample": False, "max_new_tokens": 6}
slow = pytest.mark.slow


def labels(folder, transformers):
    """A BERT with three labels."""
    special = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep")}
    given = {"tokenizer": word_pieces(), "special": special, "head": "SequenceClassification"}
    sizes = ENCODER | {"pad_token_id": 0, "num_labels": 3}
    return save(folder, transformers, "bert", sizes, **given)


def near(found, expected):
    """Whether results are the same, and numbers to rounding: under tp sums have another order."""
    if isinstance(expected, dict):
        return set(found) == set(expected) and all(near(found[k], expected[k]) for k in expected)
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(near, found, expected))
    return found == (pytest.approx(expected, abs=1e-9) if isinstance(expected, float) else expected)


@pytest.mark.parametrize("layout", ["tp2", pytest.param("pp2", marks=slow)])
@pytest.mark.parametrize(
    ("make", "task", "calls"),
    [
        (gpt2, "text-generation", [GREEDY, {"max_new_tokens": 5, "seed": 3}]),
        pytest.param(gpt2, "feature-extraction", [{}], marks=slow),
        pytest.param(bert, "fill-mask", [{"top_k": 2}, {"targets": ["sat", "ran"]}], marks=slow),
        pytest.param(bert, "feature-extraction", [{}], marks=slow),
        pytest.param(labels, "text-classification", [{"top_k": None}], marks=slow),
        pytest.param(t5, "summarization", [GREEDY, GREEDY | {"num_beams": 3}], marks=slow),
        pytest.param(t5, "feature-extraction", [{}], marks=slow),
    ],
    ids=lambda of: of.__name__ if callable(of) else None,
)
def test_ranks_find_what_one_process_finds(tmp_path, make, task, calls, layout):
    model = make(tmp_path, transformers)
    for vector in (one for one in model.parameters() if one.ndim == 1):
        torch.nn.init.normal_(vector)  # biases are not zero, that of the head neither
    model.save_pretrained(tmp_path)
    texts = [f"{text} [MASK]" for text in TEXTS] if task == "fill-mask" else TEXTS
    one = howdah.pipeline(task, tmp_path, dtype="float64")
    with closing(howdah.pipeline(task, tmp_path, dtype="float64", layout=layout)) as several:
        for how in calls:
            assert near(several(texts, **how), one(texts, **how))
        with pytest.raises(UserError, match="tokens, and the model"):
            several("the " * 60)  # a mistake ends nothing
        assert near(several(texts[0], **calls[0]), one(texts[0], **calls[0]))
    with pytest.raises(UserError, match="processes of this pipeline have ended; make another"):
        several(texts[0])


def test_what_is_no_layout_of_a_task_is_said_before_a_process_starts(tmp_path):
    gpt2(tmp_path, transformers)
    for words, sentence in (
        ({"layout": "dp2"}, "layout dp2 is for training; decoding takes tp and pp alone"),
        ({"layout": "tp5"}, "tp5 does not divide 4 heads; 4 ways would"),
        ({"layout": "tp2", "device": "cpu:0"}, "device is 'cpu:0', and ranks choose theirs"),
    ):
        with pytest.raises(UserError, match=sentence):
            howdah.pipeline("text-generation", tmp_path, **words)
