"""The parity matrix, as much of it as fits a quick suite: pairs and triples of forms on four ranks.

`make matrix` asks all of it, and layouts drawn at random on eight; docs/matrix.md has its result.
"""

import pytest

from howdah.base.errors import UserError
from howdah.comm.spawn import Workers
from howdah.plan.layout import parse_layout
from howdah.verify.matrix import (
    CONTEXTS,
    EXPERTS,
    FAMILIES,
    FORMS,
    MODELS,
    case_of,
    drawn_triples,
    families,
    pairs,
    split_model,
    together,
    triples,
)
from howdah.verify.verify import report, verify

QUICK = [
    ("tensor", "1f1b"),
    ("sequence", "zb-h1"),
    ("sequence", "recompute"),
    ("zero3", "zb-v"),
    ("zero3", "sequence"),
    ("zero2", "sequence kept"),
    ("zero1", "tensor"),
    ("zero2 whole", "interleaved"),
    ("selective", "zb-h2"),
    ("one block", "gpipe"),
    ("sequence", "naive", "recompute"),
    ("zero3", "tensor", "selective"),
    ("zero3 kept", "interleaved", "recompute"),
    ("zero3 kept", "sequence kept", "recompute"),
    ("ring", "sequence"),
    ("zero3", "all-to-all"),
    ("ring", "zb-v"),
    ("all-to-all", "recompute"),
    ("interleaved", "accumulation"),  # as many micro-batches as no multiple of the ranks
    ("zero3", "ep"),
    ("all-to-all", "ep"),
    ("both", "selective"),
    ("ring", "capacity"),
    ("1f1b", "experts"),
    ("sequence", "recompute", "capacity"),
    ("zero3", "sequence", "bloom"),
    ("all-to-all", "1f1b", "dropping"),
    ("all-to-all", "recompute", "t5"),
]


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("forms", QUICK, ids="+".join)
def test_forms_together_equal_one_device(workers, forms):
    verdict = verify(case_of(together(forms)), workers, controls=False)
    assert verdict.proved, "\n".join(report(verdict))


def test_a_cell_has_the_words_of_all_its_forms():
    """The larger of an axis; more micro-batches than one, unless a form says how many."""
    assert together(("hybrid", "tensor")) == "dp4 zero2 shard2 tp2 x2"
    for form, words in FORMS.items():
        assert set(words.split()) <= set(together((form,)).split())
        accumulated = together((form, "accumulation"))
        assert accumulated.split()[-1] == "x3", accumulated


def test_every_cell_is_a_layout_or_a_sentence():
    cells = [*pairs(), *triples(), *families()]
    assert len({cell.forms for cell in cells}) == len(cells)
    for cell in cells:
        try:
            assert str(parse_layout(split_model(cell.words)[0]))
            case_of(cell.words)
        except UserError as sentence:
            assert len(str(sentence).split()) > 5
    alone = {cell.forms[0] for cell in cells if len(cell.forms) == 1}
    assert alone == set(FORMS)


def test_every_family_has_every_pair_of_forms():
    dense = [
        cell.forms for cell in pairs() if len(cell.forms) == 2 and not {*cell.forms} & {*MODELS}
    ]
    for family in FAMILIES:
        assert [cell.forms[:2] for cell in families() if cell.forms[2] == family] == dense


DRAWN = drawn_triples(24, seed=12)
OF_FAMILIES = [*families()][::61]  # 25 of them


@pytest.fixture(scope="module")
def eight():
    found = Workers(8)
    yield found
    found.close(kill=True)


def test_drawn_triples_are_different_small_and_have_cp_or_experts():
    assert len({cell.forms for cell in DRAWN}) == 24 and drawn_triples(24, seed=12) == DRAWN
    for cell in DRAWN:
        assert parse_layout(split_model(cell.words)[0]).world <= 8
        assert set(cell.forms) & {*CONTEXTS, *MODELS}
    forms = {form for cell in DRAWN for form in cell.forms}
    assert {*CONTEXTS, *EXPERTS} <= forms


def test_the_sample_of_families_has_all_of_them():
    assert {cell.forms[2] for cell in OF_FAMILIES} == {*FAMILIES}


@pytest.mark.slow
@pytest.mark.parametrize("cell", [*DRAWN, *OF_FAMILIES], ids=lambda cell: "+".join(cell.forms))
def test_drawn_triples_and_pairs_of_families_equal_one_device(eight, cell):
    try:
        case = case_of(cell.words)
    except UserError as sentence:
        assert len(str(sentence).split()) > 5
        return
    verdict = verify(case, eight, controls=False)
    assert verdict.proved, "\n".join(report(verdict))
