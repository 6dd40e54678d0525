"""Errors of predictions: by source, with a factor, by order; and the baseline beside them."""

import json
import sys
from csv import DictWriter
from math import exp
from pathlib import Path

import pytest
from made_up_rows import LLAMA, row

from howdah.base.errors import UserError
from howdah.cli import main as cli
from howdah.shapes.products import conventions
from howdah.validation.folds import (
    at_peak,
    baseline,
    configuration,
    constant,
    folds,
    publisher_of,
    shipped_constant,
)
from howdah.validation.judging import (
    SAME_MODEL,
    SHARED,
    by_source,
    calibrated,
    judge,
    kendall,
    mean_over_sources,
    predicted_seconds,
    refused,
    sweeps,
)
from howdah.validation.plans import answer
from howdah.validation.rows import published_rows

UNKNOWN = (
    "device Abacus 2 is not known; write its dense peak behind its name, as in "
    "'Abacus 2 400 TFLOP/s'"
)
RUNS = Path(__file__).parents[3] / "shared" / "data" / "published" / "runs.csv"


def always(seconds):
    return lambda _: seconds


def errors(judged):
    return [one.error for one in judged]


# -- errors ----------------------------------------------------------------------------


def test_an_error_is_the_logarithm_in_percent():
    rows = [row(iter_time_s=str(2 * exp(0.1))), row(iter_time_s=str(2 / exp(0.1)))]
    assert errors(judge(rows, predict=always(2))) == pytest.approx([10, 10])


def test_sources_count_alike():
    rows = [
        row(source=source, iter_time_s=str(exp(part)))
        for source, part in [("a", 0.1), ("a", 0.3), ("b", 0.5)]
    ]
    judged = judge(rows, predict=always(1))
    assert by_source(judged) == {"a": pytest.approx([10, 30]), "b": pytest.approx([50])}
    assert mean_over_sources(judged) == pytest.approx(35)
    assert mean_over_sources([]) == 0


def test_what_is_refused_counts_in_full_and_what_is_unstated_not_at_all():
    def refuse(_):
        raise UserError("no")

    rows = [row(), row(gpu="Abacus 2"), row(iter_time_s=""), row(dp="", gpu_count="")]
    judged = judge(rows, predict=refuse)
    assert errors(judged) == [100, 100, None, None]
    assert refused(judged) == {
        ("refused: no", True): 1,
        (UNKNOWN, True): 1,
        ("no time published", False): 1,
        ("number of devices not published", False): 1,
    }


def test_doubtful_rows_and_rows_of_memory_are_not_scored():
    rows = [row(id=quality, quality=quality) for quality in ("A", "B", "C", "M")]
    assert [one.row["id"] for one in judge(rows, predict=always(1))] == ["A", "B"]


def test_the_row_with_the_smallest_id_calibrates_its_group():
    rows = [
        row(id="r10", iter_time_s="6"),
        row(id="r9", iter_time_s="4"),
        row(id="r8", iter_time_s="8", framework="other"),
        row(id="r7", iter_time_s="8", gpu="A100"),
        row(id="r1", gpu="Abacus 2", iter_time_s="1"),
    ]
    judged = judge(rows, "m1", always(2))
    assert [one.calibrates for one in judged] == [False, True, True, True, False]
    assert judged[0].predicted == pytest.approx(2 * (4 / 2) ** (SHARED + SAME_MODEL))
    assert errors(judged)[1:] == [None, None, None, 100]
    assert calibrated(judge(rows, predict=always(2))) == judged


def test_another_model_shares_less_of_an_error_and_one_with_experts_none():
    other = row(id="r2", model="LLAMA3-8B", layers="32", hidden="4096", heads="32")
    experts = row(id="r3", moe_experts="8", moe_topk="2", ep="8")
    judged = judge([row(id="r1", iter_time_s="4"), other, experts], "m1", always(2))
    assert [one.predicted for one in judged[1:]] == pytest.approx([2 * 2**SHARED, 2])


# -- order -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pairs", "tau"),
    [
        ([(1, 1), (2, 2), (3, 3)], 1),
        ([(1, 3), (2, 2), (3, 1)], -1),
        ([(1, 1), (2, 3), (3, 2)], 1 / 3),
        ([(1, 1), (1, 2), (1, 3)], 0),
        ([(1, 1), (1, 2), (2, 3)], 2 / 6**0.5),
    ],
)
def test_kendalls_tau(pairs, tau):
    assert kendall(pairs) == pytest.approx(tau)


def test_a_sweep_is_of_one_model_on_the_same_devices():
    cuts = [("16", "2", "2", "4"), ("32", "1", "2", "3"), ("8", "4", "2", "5")]
    rows = [row(dp=dp, tp=tp, pp=pp, ga="", iter_time_s=time) for dp, tp, pp, time in cuts]
    rows += [row(gbs="256", ga="", iter_time_s="1"), row(precision="FP8"), row(source="b")]
    judged = judge(rows, predict=lambda known: float(known.plan.layout.tp))
    (found,) = sweeps(judged)
    assert (found.rows, found.tau, found.regret) == (3, 1, 0)
    (found,) = sweeps(judge(rows, predict=lambda known: -float(known.plan.layout.tp) + 9))
    assert (found.tau, found.regret) == (-1, pytest.approx(200 / 3))
    assert sweeps(judge([rows[0]] * 3, predict=always(1))) == []  # one layout


# -- publishers and the baseline ---------------------------------------------------------


def test_releases_of_one_table_are_one_publisher():
    names = [
        "Megatron-Bridge performance summary 26.08",
        "Megatron-Bridge performance summary 25.11",
    ]
    assert {publisher_of(name) for name in names} == {"Megatron-Bridge"}
    assert publisher_of("A cluster of ours") == "A cluster of ours"


def test_no_configuration_is_on_both_sides():
    rows = [
        row(source="a"),
        row(source="b"),
        row(source="b", mbs="2", ga=""),
        row(source="c", ga="", gbs="64"),
    ]
    judged = judge(rows, predict=always(1))
    sides = {name: (len(others), len(own)) for name, others, own in folds(judged)}
    assert sides == {"a": (2, 1), "b": (1, 2), "c": (3, 1)}
    padded = configuration(answer(row(framework="torchtitan", vocab="128257")))
    assert padded == configuration(answer(row()))


def test_at_peak_the_model_flops_take_their_time():
    known = answer(row())
    work = conventions(known.plan.shape, 8192).model * 128 * 8192
    assert at_peak(known) == pytest.approx(work / 64 / 989e12)
    assert at_peak(answer(row(precision="FP8-CS"))) == pytest.approx(work / 64 / 1979e12)
    assert at_peak(answer(row(precision="FP8", gpu="A100"))) == pytest.approx(work / 64 / 312e12)


def test_the_constant_is_of_other_publishers():
    least = at_peak(answer(row()))
    rows = [
        row(source=source, gbs=total, ga="", iter_time_s=str(factor * least * int(total) / 128))
        for source, total, factor in [("a", "128", 2.0), ("b", "256", 8.0), ("c", "512", 2.0)]
    ]
    judged = judge(rows, predict=always(1))
    found = baseline(judged)
    assert [one.predicted / least for one in found] == pytest.approx([4, 4, 16])
    alone = baseline(judged, 1.0)
    assert constant(alone) == pytest.approx((2 * 8 * 2) ** (1 / 3))
    assert 1 < shipped_constant() < 10


# -- the command -----------------------------------------------------------------------


@pytest.fixture
def howdah(monkeypatch, capsys):
    def run(*words):
        monkeypatch.setattr(sys, "argv", ["howdah", "validate", "planner", *map(str, words)])
        return (cli.run(), *capsys.readouterr())

    return run


@pytest.fixture
def runs(tmp_path):
    path = tmp_path / "runs.csv"
    rows = [
        LLAMA,
        {**LLAMA, "id": "r2", "tp": "4", "dp": "8", "ga": "16"},
        {**LLAMA, "id": "r3", "gpu": "Abacus 2"},
        {**LLAMA, "id": "r4", "iter_time_s": ""},
    ]
    with path.open("w", encoding="utf-8", newline="") as file:
        out = DictWriter(file, list(LLAMA))
        out.writeheader()
        out.writerows(rows)
    return path


def test_every_row_is_in_the_json(howdah, runs):
    code, out, _ = howdah("--runs", runs, "--json")
    found = json.loads(out)
    assert code == 0
    assert [one["id"] for one in found["rows"]] == ["r1", "r2", "r3", "r4"]
    first = found["rows"][0]
    assert first["predicted"] == pytest.approx(predicted_seconds(answer(row())))
    assert (first["published"], first["reason"]) == (4.5, None)
    assert [one["error"] for one in found["rows"]][2:] == [100, None]
    assert found["rows"][2]["reason"] == UNKNOWN
    mean = sum(one["error"] for one in found["rows"][:3]) / 3
    assert found["mean_over_sources"] == pytest.approx(mean)
    with_factor = json.loads(howdah("--runs", runs, "--json", "--mode", "m1")[1])
    assert with_factor["rows"][0]["calibrates"] and with_factor["rows"][0]["error"] is None


def test_a_table_of_sources(howdah, runs):
    lines = howdah("--runs", runs)[1].splitlines()
    assert lines[0].split() == ["source", "rows", "error", "one", "constant"]
    assert lines[1].startswith("a table") and lines[2].startswith("mean over sources")
    assert lines[-2:] == [
        f"1 rows refused, counted as 100 %: {UNKNOWN}",
        "1 rows left out: no time published",
    ]


def test_mistakes_are_one_sentence(howdah, runs, tmp_path):
    assert howdah("--runs", runs, "--mode", "m2")[::2] == (
        2,
        "howdah: --mode 'm2' is unknown; known are: m0, m1\n",
    )
    code, _, told = howdah("--runs", tmp_path / "none.csv")
    assert code == 2 and told.endswith(
        "(No such file or directory); give a CSV of published runs\n"
    )
    runs.write_text(",".join(LLAMA) + "\n", "utf-8")
    assert "runs.csv has no rows below its first line" in howdah("--runs", runs)[2]


@pytest.mark.slow
def test_the_reader_of_the_benchmark_writes_what_it_found(monkeypatch, tmp_path):
    if not RUNS.is_file():
        pytest.skip("the published runs are not beside the repository")
    rows = [one for one in published_rows(RUNS) if one["source"].startswith("SimuMax")]
    judged = judge(rows)
    assert len(judged) == 22 and all(one.predicted for one in judged)


def test_one_row_calibrates_where_ids_are_equal():
    """Two rows without a number: the first of the file calibrates, and the other is scored."""
    rows = [row(id="", iter_time_s="4"), row(id="", iter_time_s="6")]
    judged = judge(rows, "m1", always(2))
    assert [one.calibrates for one in judged] == [True, False]
    assert judge([row(id="H-3"), row(id="A100-2")], "m1", always(2))[1].calibrates


@pytest.mark.parametrize("seconds", ["1e-320", "1e300"])
def test_times_that_no_step_takes_are_not_published(seconds):
    (one,) = judge([row(iter_time_s=seconds)], "m0", always(2))
    assert one.error is None and "no time" in one.reason


@pytest.mark.parametrize(
    "fields",
    [
        {"inter_link": "0 x 200Gb/s", "gpu_count": "16", "dp": "16"},
        {"intra_link": "PCIe 0 GB/s"},
        {"notes": 'args: {"--decoder-first-pipeline-num-layers": "abc"}', "pp": "2", "dp": "4"},
    ],
)
def test_no_row_ends_the_others(fields):
    """A row that cannot be believed has a prediction or a reason."""
    first, second = judge([row(**fields), row()], "m0")
    assert first.predicted > 0 or first.reason
    assert second.predicted > 0
