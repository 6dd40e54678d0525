"""The benchmark between hosts: its cells, its prices, and what it promises."""

import sys
from collections import Counter
from pathlib import Path

import pytest

from howdah.machines.topology import Kept, Topology, spell

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def scripts(monkeypatch):
    """Imports modules of bench/collectives and bench/cluster."""
    before = set(sys.modules)

    def load(*names):
        for path in (BENCH, BENCH / "cluster", BENCH / "collectives"):
            monkeypatch.syspath_prepend(str(path))
        return [__import__(name) for name in names]

    yield load
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").is_relative_to(BENCH):
            del sys.modules[name]


def row_of(cases, cell, seconds, *, sent=None):
    """A row of the store in which every contestant took `seconds(text)`."""
    hosts, each = cell.shape
    names = tuple(f"host{h}" for h in range(hosts))
    rates = tuple(tuple(1.2e8 * (a != b) for b in range(hosts)) for a in range(hosts))
    probe = spell(Kept(Topology(names, each, rates, 1e-4, 2e-5)))
    return {
        **{name: getattr(cell, name) for name in ("profile", "op", "bytes", "grid", "key")},
        "shape": str(cell.shape),
        "probe": probe,
        "contestants": {
            text: {"seconds": seconds(text), "wrong": 0, "sent": sent or [0] * hosts}
            for text in cell.texts
        },
    }


def test_every_cell_has_prices(scripts):
    cases, prices = scripts("host_cases", "host_prices")
    cells = [*cases.link_cells(), *cases.sweep_cells()]
    assert len({cell.key for cell in cells}) == len(cells)
    for cell in cells:
        if cell.bytes != 1 << 20:
            continue
        row = row_of(cases, cell, lambda text: 1.0)
        cluster = prices.cluster_for(row)
        for text in cell.texts:
            seconds, on_links, leaves = prices.priced(row, text, cluster)
            assert bool(seconds) == (text != "gloo") and on_links <= seconds
            assert text == "gloo" or sum(leaves) > 0
    every = {cell.op for cell in cells}
    assert every == {*cases.OPS} and {cell.profile for cell in cells} == {"flat-1g", "edge-100m"}


def test_the_selector_is_asked_all_that_was_promised(scripts):
    (cases,) = scripts("host_cases")
    cells = [*cases.selector_cells()]
    assert len({cell.key for cell in cells}) == len(cells) == 7 * 9 * 5 * 3
    assert {cell.shape.hosts * cell.shape.each for cell in cells} == {2, 3, 4, 6, 8}


def test_any_first_part_of_the_selectors_cells_is_of_all_kinds(scripts):
    """In the order of loops a run of an hour would have judged one profile alone."""
    (cases,) = scripts("host_cases")
    cells = [*cases.selector_cells()]
    for visits in range(1, len(cells) // 7 + 1):
        part = cells[: 7 * visits]
        assert {Counter(cell.op for cell in part)[op] for op in cases.SIZED} == {visits}
        for kind in ("profile", "shape"):
            counts = Counter(getattr(cell, kind) for cell in part)
            assert max(counts.values()) - min(counts.values()) <= 7
    first = cells[: cases.ROUND]
    assert len({(cell.profile, cell.shape) for cell in first}) == 15
    assert {*Counter(cell.bytes for cell in first).values()} == {11, 12, 13}


def test_prices_of_rings_on_a_profile(scripts):
    """Bytes at the payload's share of the card's rate, and the rounds' cost of messages."""
    cases, prices, clusters = scripts("host_cases", "host_prices", "clusters")
    cell = next(c for c in cases.link_cells() if c.key == "link flat-1g 4x1 all_reduce 16777216")
    row = row_of(cases, cell, lambda text: 1.0)
    seconds, on_links, leaves = prices.priced(row, "ring", prices.cluster_for(row))
    assert on_links == pytest.approx(1.5 * 2**24 / (125e6 * 1448 / 1514))
    assert seconds - on_links == pytest.approx(6 * (1e-4 + 2 * 2e-5))
    assert leaves == [3 * 2**23] * 4
    assert clusters.rate(250) == pytest.approx(clusters.rate(1000) / 4)


def judged(scripts, factor, *, sent=1.02):
    """The verdicts on two cells whose contestants took so many times their prices."""
    cases, prices, tables = scripts("host_cases", "host_prices", "host_tables")
    rows = []
    for key in ("link flat-1g 4x1 all_reduce 16777216", "link flat-1g 4x1 all_reduce 1024"):
        cell = next(c for c in cases.link_cells() if c.key == key)
        row = row_of(cases, cell, lambda text: 1.0)
        cluster = prices.cluster_for(row)
        for text, one in row["contestants"].items():
            seconds, _, leaves = prices.priced(row, text, cluster)
            one["seconds"] = (seconds or 1.0) * (factor if cell.bytes > 1024 else 50)
            one["sent"] = [int(each * sent) for each in leaves] or one["sent"]
        rows.append(row)
    return (
        tables,
        rows,
        {one["goal"].split(":")[-1].strip(): one for one in tables.verdicts(rows, of=2)},
    )


@pytest.mark.parametrize(("factor", "far", "middle"), [(1.05, 1, 1), (1.2, 1, 0), (0.7, 0, 0)])
def test_prices_are_judged_where_links_decide(scripts, factor, far, middle):
    """The cell of 1 KiB is fifty times its price, and no goal asks for it."""
    _, _, told = judged(scripts, factor)
    assert told["the farthest"]["met"] == bool(far)
    assert told["the median"]["met"] == bool(middle)
    assert told["the farthest"]["found"] == pytest.approx(abs(factor - 1))


@pytest.mark.parametrize(("sent", "met"), [(1.02, True), (1.2, False), (0.9, False)])
def test_bytes_of_cards_are_judged(scripts, sent, met):
    _, _, told = judged(scripts, 1.0, sent=sent)
    assert (told["the least"]["met"] and told["the most"]["met"]) == met


def test_gloo_is_named_where_it_is_better(scripts):
    tables, rows, told = judged(scripts, 1.0)
    text = tables.report("A machine.", rows, [*told.values()])
    assert "| flat-1g 4x1 all_reduce 1024 | " in text
    for row in rows:
        row["contestants"]["gloo"]["seconds"] = 1e-9
    assert "**gloo**" in tables.report("A machine.", rows, []) and "**gloo**" not in text


def test_the_selector_is_judged_against_the_best(scripts):
    cases, prices, tables = scripts("host_cases", "host_prices", "host_tables")
    cells = [c for c in cases.selector_cells() if c.bytes == 1 << 20 and c.op == "reduce"][:4]
    rows = [row_of(cases, cell, lambda text: 1.0) for cell in cells]
    assert tables.selected(rows) == 1.0 and tables.selected([]) is None
    (told,) = tables.verdicts(rows, of=945)
    assert told["goal"].endswith("4 cells, of 945") and told["met"]
    taken = prices.chosen_for(rows[0])
    other = next(text for text in rows[0]["contestants"] if text != taken)
    rows[0]["contestants"][taken]["blocks"] = [1.0] * 5
    rows[0]["contestants"][other] |= {"seconds": 0.8, "blocks": [0.7, 0.8, 0.8, 1.0, 1.1]}
    assert tables.selected(rows) == 1.0  # within the spread of its blocks
    rows[0]["contestants"][other] |= {"seconds": 0.8, "blocks": [0.8] * 5}
    assert tables.selected(rows) == 0.75
    assert f"| {taken} | 1.25 | {other} |" in tables.report("A machine.", rows, [])


def test_the_formula_of_the_ring_in_pieces(scripts):
    (cases,) = scripts("host_cases")
    assert cases.formula(4, 1, 100, 10.0) == pytest.approx(30)
    assert cases.formula(4, 100, 100, 10.0) == pytest.approx(10.2)
