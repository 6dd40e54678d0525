"""What a checkpoint says of its training is typed, or a sentence; never an error of Python's."""

import pytest
from sample_state import about, parts, savers, silent, state

from howdah.base.errors import UserError
from howdah.checkpoint.facts import Facts, facts
from howdah.checkpoint.load import newest
from howdah.shapes.presets import preset
from howdah.shapes.shape import RopeScaling
from howdah.text.order import Order
from howdah.train.resume import as_plain

META = {
    "model": as_plain(preset("llama3-1b")),
    "tokenizer": "abc",
    "end": 3,
    "optimizer": "adamw",
    "precision": "bf16",
    "order": {"seed": 1, "sequence": 8, "samples": [10, 20], "shares": [500, 500]},
    "best_loss": 2.5,
}


def checkpoint(folder, meta):
    (saver,) = savers(folder, 1)
    saver.save(step=7, entries=parts(state(), 1)[0], about=about(meta=meta))
    saver.wait()
    return newest(folder, silent)


def test_the_facts_come_back_typed(tmp_path):
    found = facts(checkpoint(tmp_path, META))
    order = Order(1, 8, (10, 20), (500, 500))
    assert found == Facts(preset("llama3-1b"), "abc", 3, "adamw", order, 2.5)
    assert found.model.rope_scaling == RopeScaling(32.0, 1.0, 4.0, 8192)


def test_what_was_not_known_when_it_was_saved_has_its_usual_value(tmp_path):
    plain = {name: META["model"][name] for name in META["model"] if name != "qkv_bias"}
    meta = {name: META[name] for name in META if name != "best_loss"}
    found = facts(checkpoint(tmp_path, meta | {"model": plain}))
    assert (found.model, found.best_loss) == (preset("llama3-1b"), None)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model": None}, "model is None; it must be a table"),
        ({"model": 3}, "model is 3; it must be a table"),
        ({"model": {}}, "model.layers, width, heads, ffn_size, vocab, context are missing"),
        ({"model": META["model"] | {"layers": "2"}}, "model.layers is '2'; it must be a whole"),
        ({"model": META["model"] | {"layers": 10**12}}, "model.layers is 1000000000000; it must"),
        ({"model": META["model"] | {"news": 1}}, "unknown key 'model.news'"),
        ({"model": META["model"] | {"heads": 7}}, "does not divide into 7 heads"),
        ({"tokenizer": 7}, "tokenizer is 7; it must be a text in quotes"),
        ({"end": "3"}, "end is '3'; it must be a whole number"),
        ({"end": -1}, "end is -1, which is no token"),
        ({"end": 10**9}, "end is 1000000000, which is no token"),
        ({"optimizer": ["adamw"]}, "optimizer is ['adamw']; it must be a text"),
        ({"order": []}, "order is []; it must be a table"),
        ({"order": META["order"] | {"samples": 3}}, "order.samples is 3; it must be a list"),
        ({"order": META["order"] | {"samples": ["a"]}}, "order.samples[0] is 'a'; it must be a w"),
        ({"order": META["order"] | {"samples": [0, 1]}}, "order holds a number that is no count"),
        ({"order": META["order"] | {"shares": []}}, "order holds a number that is no count"),
        ({"best_loss": "low"}, "best_loss is 'low'; it must be a number"),
        ({"updates": -1}, "updates is -1, which is no count"),
        ({"updates": 1.5}, "updates is 1.5; it must be a whole number"),
    ],
)
def test_facts_that_make_no_sense_are_a_sentence(tmp_path, changes, sentence):
    with pytest.raises(
        UserError, match="step-00000007 does not say what it was trained with:"
    ) as e:
        facts(checkpoint(tmp_path, META | changes))
    assert sentence in str(e.value) and str(e.value).endswith("; use another checkpoint")


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        *((name, f"{name} is") for name in ("tokenizer", "end", "optimizer")),
        ("model", "model.layers, .*, model.context are"),
        ("order", "order.seed, order.sequence, order.samples, order.shares are"),
    ],
)
def test_facts_that_are_missing_are_a_sentence(tmp_path, name, missing):
    meta = {other: META[other] for other in META if other != name}
    with pytest.raises(UserError, match=f"{missing} missing; use another checkpoint"):
        facts(checkpoint(tmp_path, meta))
