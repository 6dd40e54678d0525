"""Padded rows: each document has samples of its own, each token is predicted once, and padding is a
document that nothing attends to.
"""

from dataclasses import replace

import pytest
from made_corpus import END, corpus, stream
from small_runs import copy_until, losses, train_on

from howdah.base.errors import UserError
from howdah.text.batches import MASKED, Rows, micros, order_of
from howdah.text.sources import Data, Source, check_sources
from howdah.train.start import prepare_start, prepare_tokens

LENGTHS = (3, 9, 1, 4, 8)


def rows_of(length=4, lengths=LENGTHS):
    """All samples of a source of padded documents, one row each, in sequence."""
    made = corpus(replace(stream(*lengths), padded=True))
    made = replace(made, order="sequential")
    order = order_of(made, sequence=length, seed=1)
    (micro,) = micros(made, order, Rows(order.samples[0]), first=0, size=order.samples[0])
    return made, micro


def test_each_token_is_predicted_once_in_a_row_of_its_document():
    made, micro = rows_of()
    wanted = micro.labels[micro.labels != MASKED]
    assert sorted(wanted.tolist()) == sorted(made.sources[0].ids[1:].tolist())
    assert len(micro.tokens) == sum(-(-(n + 1) // 4) for n in LENGTHS) == 1 + 3 + 1 + 2 + 3
    assert micro.tokens[:4].tolist() == [[0, 1, 2, 3], [0, 4, 5, 6], [7, 8, 9, 10], [11, 12, 0, 0]]
    assert micro.labels[:4].tolist() == [
        [1, 2, 3, END],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
        [12, END, MASKED, MASKED],
    ]


def test_padding_is_a_document_of_its_own_and_positions_begin_in_each_row():
    _, micro = rows_of()
    assert micro.documents[3].tolist() == [0, 0, 1, 1]
    assert micro.positions[3].tolist() == [0, 1, 0, 1]
    assert micro.documents[-1].tolist() == [0, 1, 1, 1]  # the last document, too
    assert (micro.documents[0] == 0).all() and micro.positions[1].tolist() == [0, 1, 2, 3]


def test_pairs_are_not_padded_twice():
    data = Data(sources=(Source("a.jsonl", "en", target="de"),), rows="padded")
    (problem,) = check_sources(data)
    assert problem.startswith("data.rows is of texts")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["data.rows=padded", "data.order=sequential"])
def test_a_run_goes_on_with_the_next_sample(workers, make_job, tmp_path, how):
    """Its last ten steps again, on two ranks, have the losses that they had."""
    train_on(workers, make_job("a", how))
    copy_until(tmp_path / "a", tmp_path / "b", 10)
    train_on(workers, make_job("b", how, "layout=dp2"))
    assert losses(tmp_path / "b") == pytest.approx(losses(tmp_path / "a"), rel=1e-6)
    with pytest.raises(UserError, match=r"was trained with (samples of each source|data\.order)"):
        other = make_job("b", "layout=dp2")
        prepare_start(other, prepare_tokens(other, print))
