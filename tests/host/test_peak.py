"""The flop/s that mfu divides by: measured once for a machine, whatever happens to the file."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from howdah.base.errors import UserError
from howdah.host import peak
from howdah.host.doctor import judge_peaks
from howdah.host.peak import Facts, Measured, facts_of, kept, measure, measure_again, peak_flops
from howdah.train.loop import peak_of

CPU = torch.device("cpu")
HERE = Facts("a CPU", "AVX2", 2, 1, "float32", "2.13.0")
H200 = Facts("NVIDIA H200", "CUDA 12.8", 0, 0, "float32", "2.13.0")
H100_PCIE = replace(H200, model="NVIDIA H100 PCIe")


@pytest.fixture
def measurements(monkeypatch):
    """Numbers that the next measurements find, and the facts of those that were made."""
    made, numbers = [], iter(range(100, 200))

    def made_up(facts, device):
        made.append(facts)
        return Measured(facts, float(next(numbers)), 512, share=1.0)

    monkeypatch.setattr(peak, "measure", made_up)
    return made


def ask(cache, *, threads=1, dtype=torch.float32):
    """The number that a run gets, and what it says."""
    said = []
    found = peak_flops(CPU, dtype, threads=threads, cache=cache, say=said.append)
    return found.flops, found.source, said


MEASURED = "measured 512³ matrix product"


def test_two_runs_on_a_machine_divide_by_one_number(tmp_path, measurements):
    assert ask(tmp_path) == ask(tmp_path) == (100.0, MEASURED, [])
    assert len(measurements) == 1


@pytest.mark.parametrize(
    ("numbers", "shares", "told"),
    [
        ((36, 362, 400), (0.4, 0.95, 1.0), (36, 362, 362)),  # quiet at last, and kept from then on
        ((36, 20, 50), (0.4, 0.3, 0.5), (36, 36, 50)),  # busy: the highest so far
        ((36, 30, 400), (0.4, 0.95, 1.0), (36, 30, 30)),  # what was not disturbed is believed
    ],
)
def test_a_number_of_a_busy_machine_gives_way(tmp_path, monkeypatch, numbers, shares, told):
    """36 Gflop/s stayed, where the machine alone has 362: `mfu` was ten times too high for good."""
    found = [Measured(HERE, n * 1e9, 512, share=s) for n, s in zip(numbers, shares, strict=True)]
    monkeypatch.setattr(peak, "facts_of", lambda *which: HERE)
    monkeypatch.setattr(peak, "measure", lambda facts, device: found.pop(0))
    asked = [ask(tmp_path) for _ in told]
    assert [flops for flops, *_ in asked] == [n * 1e9 for n in told]
    busy = [source.endswith("on a busy machine") for _, source, _ in asked]
    assert busy == [not any(share > 0.9 for share in shares[: n + 1]) for n in range(3)]


def test_each_precision_and_number_of_threads_has_its_own(tmp_path, measurements):
    questions = [{}, {"threads": 2}, {"dtype": torch.bfloat16}] * 2
    assert [ask(tmp_path, **one)[0] for one in questions] == [100, 101, 102] * 2


@pytest.mark.parametrize("change", ["model", "vectors", "cores", "torch"])
def test_another_machine_is_measured_too(tmp_path, measurements, monkeypatch, change):
    ask(tmp_path)
    other = {"cores": 99}.get(change, "another")
    monkeypatch.setattr(
        peak, "facts_of", lambda *which: replace(facts_of(*which), **{change: other})
    )
    assert ask(tmp_path)[0] == 101


def damaged(text=None, **changes):
    """Changes a kept file: to another text, or some values of it."""
    return lambda path: path.write_text(
        json.dumps(json.loads(path.read_text()) | changes) if text is None else text
    )


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (damaged(""), "Expecting value"),
        (damaged("[]"), "it is no table"),
        (damaged("\0"), "Expecting value"),
        (damaged(flops=0), "flops is 0"),
        (damaged(flops="many"), "flops is 'many'"),
        (damaged('{"flops": NaN}'), "NaN is no number"),
        (damaged(facts={"model": "another"}), "facts.vectors, "),
        (damaged(facts=vars(HERE)), "it is of another machine"),
        (lambda path: path.chmod(0o666), "other users can write it"),
    ],
)
def test_a_file_that_cannot_be_believed_is_measured_again(tmp_path, measurements, change, why):
    ask(tmp_path)
    (path,) = (tmp_path / "peaks").iterdir()
    change(path)
    flops, _, (said,) = ask(tmp_path)
    assert flops == 101 and f"{path} is not used ({why}" in said
    assert said.endswith("it is measured again")
    assert ask(tmp_path) == (101, MEASURED, [])  # it was replaced


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path, measurements):
    (tmp_path / "file").write_text("")  # root may write anywhere, but not below a file
    flops, source, _ = ask(tmp_path / "file")
    assert (flops, source) == (100.0, f"{MEASURED}, by this run alone")
    with pytest.raises(UserError, match=r"cannot be kept in .*peaks \(.*\): set HOWDAH_CACHE to"):
        measure_again(CPU, tmp_path / "file")


def test_measuring_again_replaces_what_is_kept(tmp_path, measurements):
    ask(tmp_path, threads=7, dtype=torch.float64)
    measure_again(CPU, tmp_path)
    assert ask(tmp_path, threads=7, dtype=torch.float64)[0] != 100
    found = {(one.facts.precision, one.facts.threads) for one in kept(tmp_path, measurements[0])}
    assert found >= {("float64", 7), ("float32", 1), ("bfloat16", 1)}


def test_the_cache_of_several_machines_shows_those_of_one(tmp_path):
    for facts in (HERE, replace(HERE, threads=4), replace(HERE, model="another")):
        peak.keep(tmp_path / "peaks" / peak.file_name(facts), Measured(facts, 1e9, 512, share=1.0))
    (tmp_path / "peaks" / "damaged.json").write_text("{")
    assert {one.facts.threads for one in kept(tmp_path, HERE)} == {1, 4}


def test_a_measurement_uses_the_threads_that_it_is_of(monkeypatch):
    used = []
    monkeypatch.setattr(peak, "SIZES", {"cpu": (8, 16)})
    monkeypatch.setattr(
        peak,
        "_products",
        lambda *what, turned: used.append(torch.get_num_threads()) or 1e9 * what[1],
    )
    before = torch.get_num_threads()
    found = measure(replace(HERE, threads=before + 1), CPU)
    assert used == [before + 1] * 2 * 3 and torch.get_num_threads() == before
    assert (found.flops, found.size) == (16e9, 16) and 0 <= found.share <= 1


def test_larger_products_are_left_out_where_one_takes_long(monkeypatch):
    """In bf16 a processor that does not know it took a minute for one of 2048; and the product of a
    linear layer's forward pass is ten times as fast there as the plain one, whose speed alone was
    measured: runs told of 200 % of it.
    """
    used = []

    def products(precision, size, device, *, turned):
        used.append((turned, size))
        return {"": 1e9, "second": 1e10, "first": 1e11}[turned]

    monkeypatch.setattr(peak, "_products", products)
    found = measure(HERE, CPU)
    assert (found.flops, found.size) == (1e11, 2048)
    sizes = {turned: [n for one, n in used if one == turned] for turned in ("", "second", "first")}
    assert sizes == {"": [512], "second": [512, 1024], "first": [512, 1024, 2048]}


def test_a_real_product_has_a_speed(monkeypatch):
    monkeypatch.setattr(peak, "SECONDS", 0.0)
    monkeypatch.setattr(peak, "SIZES", {"cpu": (64,)})
    assert 1e6 < measure(facts_of(CPU, torch.float32, 1), CPU).flops < 1e15


def test_what_is_multiplied_is_random_and_leaves_other_draws_alone(monkeypatch):
    """A product of ones runs 13 % faster on an H200, which draws less power for it."""
    seen, multiply = [], torch.Tensor.__matmul__
    monkeypatch.setattr(peak, "SECONDS", 0.0)
    monkeypatch.setattr(peak, "LONG", 1e9)
    monkeypatch.setattr(peak, "SIZES", {"cpu": (64,)})
    monkeypatch.setattr(
        torch.Tensor, "__matmul__", lambda a, b: seen.append((a, b)) or multiply(a, b)
    )
    before = torch.get_rng_state()
    measure(facts_of(CPU, torch.bfloat16, 1), CPU)
    assert len(seen) >= peak.LEAST
    for matrix in (one for pair in seen for one in pair):
        assert len(matrix.unique()) > 500 and abs(float(matrix.float().std()) - 1) < 0.05
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("facts", "peak_and_source"),
    [
        (replace(H200, precision="bfloat16"), (989e12, "NVIDIA H200 data sheet, dense bf16")),
        (H200, (67e12, "NVIDIA H200 data sheet, dense float32")),
        (replace(H200, precision="float16"), None),  # no run computes in it
        (H100_PCIE, None),
        (replace(H200, model="Tesla V100-SXM2-16GB", precision="bfloat16"), None),  # it has none
        (replace(HERE, model="NVIDIA H200"), None),  # a CPU, whatever it is called
    ],
)
def test_a_card_has_the_peak_of_its_data_sheet_or_is_measured(facts, peak_and_source):
    assert peak.data_sheet(facts) == peak_and_source


def test_a_measured_card_says_with_what():
    assert Measured(H100_PCIE, 5e14, 8192, share=1.0).source == (
        "measured 8192³ product of random matrices: no data sheet of this card"
    )


def test_all_ranks_divide_by_the_number_of_rank_0(monkeypatch, tmp_path):
    """The sum over the ranks, of which the others give nothing and measure nothing."""
    given = []
    monkeypatch.setattr("howdah.train.loop.peak_flops", lambda *_, **__: peak.Peak(5.0, "measured"))
    job = SimpleNamespace(method=SimpleNamespace(precision="bf16"), threads=1, cache=tmp_path)
    for rank in (0, 1):
        world = SimpleNamespace(sum_scalars=lambda values: given.append(values) or [5.0])
        mesh = SimpleNamespace(rank=rank, device=CPU, world=world)
        assert peak_of(job, mesh, say=print).flops == 5.0
    assert given == [[5.0], [0.0]]


# -- what the doctor shows -------------------------------------------------------------

BF16 = replace(HERE, precision="bfloat16")
ONE = "with 1 thread"
QUIET, DISTURBED = Measured(HERE, 218e9, 512, share=0.99), Measured(BF16, 1.4e12, 512, share=0.5)


@pytest.mark.parametrize(
    ("here", "found", "value", "lack"),
    [
        (HERE, [], "not measured yet; a run does it, or howdah doctor --measure", None),
        (HERE, [QUIET], "Gflop/s: 218 float32 with 1 thread", None),
        (
            HERE,
            [DISTURBED, QUIET, replace(QUIET, facts=replace(HERE, threads=2))],
            f"Gflop/s: 1,400 bfloat16 {ONE}, 218 float32 {ONE}, 218 float32 with 2 threads",
            "so it is too low: run howdah doctor --measure",
        ),
        (H200, [], "Gflop/s: 67,000 float32, 989,000 bfloat16 (data sheet)", None),
        (
            H100_PCIE,
            [Measured(H100_PCIE, 5e13, 8192, share=1.0)],
            "Gflop/s: 50,000 float32",
            None,
        ),
    ],
)
def test_the_doctor_shows_what_is_kept(here, found, value, lack):
    finding = judge_peaks(here, found)
    assert (finding.name, finding.value) == ("peak", value)
    assert (finding.lack is None) == (lack is None) and (lack or "") in (finding.lack or "")


def test_a_measurement_on_a_busy_machine_says_so():
    assert DISTURBED.source == f"{MEASURED} on a busy machine"
    assert Path(peak.file_name(HERE)).suffix == ".json"
