"""Gradients that are reduced in 4 bits, in one hop or two: the sums of a model in one process, the
bytes and the memory that were predicted, and how a run does with it.
"""

import shutil
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from in_flight import message_for_each_unit
from small_cases import case_of
from small_runs import assert_same_bits, forget, losses, tensors, train_on

from howdah.base.errors import UserError
from howdah.model.blockwise import quantise, restore
from howdah.parallel import sums
from howdah.parallel.apply import apply
from howdah.parallel.flat_params import random_init
from howdah.parallel.mesh import connect_mesh
from howdah.parallel.quantised_sums import QuantisedSums
from howdah.parallel.unit_messages import Arriving
from howdah.plan.comm import Algorithms, Comm
from howdah.plan.layout import parse_layout
from howdah.plan.method import Method
from howdah.plan.method_problems import own_problems
from howdah.plan.quantised import BLOCK, hops, message_bytes, reducing_bytes
from howdah.plan.recording import Wires
from howdah.shapes.weights import weights
from howdah.sim.chosen import HOPS_ON_CUDA, choice_misfits, cuda_problem
from howdah.sim.traffic import step_traffic
from howdah.train.report import _tensors, predicted_memory
from howdah.train.step import StepContext, train_step
from howdah.verify.evidence import _batch, gather, rate_of

SLOW = pytest.mark.slow
INT4 = Method("float32", gradient_dtype="int4")


def narrow_case(words, gradient_dtype="int4", *, feedback=False):
    case = case_of(words, precision="float32")
    method = Method("float32", gradient_dtype=gradient_dtype, gradient_feedback=feedback)
    return replace(case, method=method)


# -- one process -----------------------------------------------------------------------


def by_definition(x):
    """Each block as integers from -7 to 7 times a float32 scale."""
    blocks = x.reshape(-1, BLOCK)
    scales = (np.abs(blocks).max(1, keepdims=True) / np.float32(7)).astype(np.float32)
    numbers = np.rint(np.divide(blocks, scales, out=np.zeros_like(blocks), where=scales > 0))
    return (numbers * scales).reshape(-1)


def in_one_process(terms, node, away=None):
    """The sum of all ranks' terms, as rounded in each hop: by rank, and by node of `node` ranks.

    away  what was rounded away before, by hop and who sent it; None: that is forgotten
    """
    sent = [in_a_hop(term, away, (1, at)) for at, term in enumerate(terms)]
    if node:
        nodes = [sum(sent[at : at + node]) for at in range(0, len(sent), node)]
        sent = [in_a_hop(term, away, (2, at)) for at, term in enumerate(nodes)]
    return sum(sent[1:], sent[0])


def in_a_hop(term, away, who):
    if away is None:
        return by_definition(term)
    term = term + away.get(who, np.float32(0))
    sent = by_definition(term)
    away[who] = term - sent
    return sent


class Watching(QuantisedSums):
    """Writes down what is summed, and the share of the sum."""

    def __init__(self, *given):
        super().__init__(*given)
        self.log = []

    def start(self, units, flats, owns):
        before = [flat.clone().numpy() for flat in flats]
        handle = super().start(units, flats, owns)
        return Arriving(
            handle, lambda: self.log.append((units, before, [own.clone().numpy() for own in owns]))
        )


def stepped(transport, case, kind, apart):
    """After a step: what was summed, bytes of the window and messages, measured and predicted."""
    with (
        patch.object(sums, "QuantisedSums", kind),
        message_for_each_unit(apart),
        connect_mesh(case.layout, transport, torch.device("cpu")) as mesh,
    ):
        placed = apply(case.plan, mesh=mesh, fill=random_init(weights(case.shape), case.seed))
        context = StepContext(placed, mesh, case.method, case.seed)
        train_step(context, _batch(case, 0, rank=mesh.rank), step=0, rate=rate_of(case, 0))
        predicted = predicted_memory(case.plan, mesh.rank)["reduced"]
        log = getattr(placed.sums._quantised, "log", [])
        return log, _tensors(placed)["reduced"], predicted


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("feedback", [False, True], ids=["forgotten", "fed back"])
@pytest.mark.parametrize(
    ("words", "apart"),
    [
        ("dp3 zero2 x2", False),
        ("dp4 zero3 hpz2 x2", True),
        *(
            pytest.param(*both, marks=SLOW)
            for both in (
                ("dp2 zero3 x2", True),
                ("dp2 zero3 recompute=full x1", False),
                ("dp4 zero3 hpz2 x2", False),
                ("dp4 zero2 optimizer=host x3", True),
            )
        ),
    ],
)
def test_sums_are_those_of_one_process_and_memory_is_predicted(workers, words, apart, feedback):
    case, away = narrow_case(words, feedback=feedback), {}
    found = workers.run(stepped, case, Watching, apart, ranks=case.layout.world)
    assert all(measured == predicted for _, measured, predicted in found)
    logs = [log for log, *_ in found]
    assert len({len(log) for log in logs}) == 1 and len(logs[0]) >= case.layout.micros
    for bucket in zip(*logs, strict=True):
        units, flats, owns = ([one[at] for one in bucket] for at in (0, 1, 2))
        of_units = zip(units[0], zip(*flats, strict=True), zip(*owns, strict=True), strict=True)
        for unit, terms, shares in of_units:
            before = away.setdefault(unit, {}) if feedback else None
            expected = in_one_process(terms, case.layout.hpz, before)
            assert np.array_equal(np.concatenate(shares), expected)
            assert not np.array_equal(expected, sum(terms[1:], terms[0]))


class Reversed(QuantisedSums):
    """Adds what comes in other shares' order."""

    def _reduce(self, errors, flat, own, rest):
        flat.copy_(flat.roll(BLOCK))
        return super()._reduce(errors, flat, own, rest)


@pytest.mark.parametrize("words", [pytest.param("dp3 zero2 x2", marks=SLOW), "dp4 zero3 hpz2 x2"])
def test_bytes_are_predicted_and_gradients_are_near(workers, words):
    narrow = narrow_case(words)
    found = workers.run(gather, narrow, ranks=narrow.layout.world)
    (exact, *_) = workers.run(gather, narrow_case(words, "full"), ranks=narrow.layout.world)
    for rank, one in enumerate(found):
        predicted = step_traffic(narrow.plan, rank, one.wires)
        sent = {row: count for row, count in one.sent.items() if count}
        assert sent == {row: narrow.steps * count for row, count in predicted.items()}
        assert one.checksums == found[0].checksums or narrow.layout.zero == 3
        assert one.losses == found[0].losses and one.norms == found[0].norms
    for name, gradient in exact.gradients.items():
        apart = np.linalg.norm(found[0].gradients[name] - gradient)
        assert 0 < apart <= 0.5 * np.linalg.norm(gradient), name
    broken = workers.run(gather_reversed, narrow, ranks=narrow.layout.world)[0]
    far = [
        np.linalg.norm(broken.gradients[name] - gradient) > 0.5 * np.linalg.norm(gradient)
        for name, gradient in exact.gradients.items()
    ]
    assert sum(far) > len(far) / 2


def gather_reversed(transport, case):
    with patch.object(sums, "QuantisedSums", Reversed):
        return gather(transport, case)


# -- what is sent ----------------------------------------------------------------------


def test_between_nodes_go_the_sums_of_nodes():
    """Eight ranks in nodes of four: 3/4 of a gradient inside, 1/8 of it between, in 4 bits."""
    assert [*hops(8 * BLOCK, [4, 2])] == [(4, 2048, 2 * 132), (2, 512, 132)]
    assert reducing_bytes(8 * BLOCK, [4, 2], 4) == 2 * 4 * 264 + 2 * 2 * 132 + 512 * 4
    wires, found = Wires("shared", "tcp", node=4), {}
    for words, dtype in (("", "full"), ("", "int4"), ("hpz4 ", "int4")):
        plan = narrow_case(f"dp8 zero3 {words}x1", dtype).plan
        rows = step_traffic(plan, 0, wires).items()
        reduces = ("all_to_all", "reduce_scatter")
        found[words, dtype] = {
            row.link: count for row, count in rows if row.operation in reduces and count
        }
    flat, two = found["", "int4"], found["hpz4 ", "int4"]
    assert found["", "full"]["tcp"] > 10 * two["tcp"]  # 31 times without padding
    assert two["tcp"] * 4 == flat["tcp"] and two["shared"] == flat["shared"] * 2


def test_two_numbers_are_in_a_byte():
    x = torch.randn(4 * BLOCK)
    message, out = torch.empty(message_bytes(len(x), 4), dtype=torch.uint8), torch.empty(4 * BLOCK)
    assert len(message) == 4 * (BLOCK // 2 + 4)
    quantise(x, message, 4)
    restore(message, out, shares=1, bits=4)
    assert np.array_equal(out.numpy(), by_definition(x.numpy()))
    assert float((out - x).abs().max()) <= 0.51 * float(x.abs().max()) / 7


@SLOW
def test_a_run_in_eight_and_four_bits_learns(workers, make_job, tmp_path):
    words = "layout=dp4 zero3 hpz2", "batch.global_batch=8"
    train_on(workers, make_job("full", *words))
    both = "method.gather_dtype=int8", "method.gradient_dtype=int4"
    train_on(workers, make_job("narrow", *words, *both))
    assert ": equal" in (tmp_path / "narrow" / "log.txt").read_text()
    one, other = losses(tmp_path / "full"), losses(tmp_path / "narrow")
    assert one != other and other[20] == pytest.approx(one[20], rel=0.05)


def summed_often(transport, feedback):
    """The mean of many sums of one gradient in 4 bits, beside the exact sum."""
    like = torch.empty(0)
    with connect_mesh(parse_layout("dp2"), transport, torch.device("cpu")) as mesh:
        of = QuantisedSums([mesh.world], 2 * BLOCK, like, {"unit": 2 * BLOCK} if feedback else {})
        terms = torch.randn(2 * BLOCK, generator=torch.Generator().manual_seed(mesh.rank))
        exact, mean = terms.clone(), torch.zeros(BLOCK)
        mesh.world.all_reduce(exact)
        for _ in range(TIMES):
            flat = terms.clone()
            own = mesh.world.own_shard(flat)
            of.settle()
            of.start(["unit"], [flat], [own]).result()
            mean += own / TIMES
        return float((mean - mesh.world.own_shard(exact)).abs().max())


TIMES = 64


def test_what_was_rounded_away_comes_the_next_time(workers):
    """A sum is off by half a step of the scale for ever, or by that of one time in all."""
    forgotten, fed_back = (max(workers.run(summed_often, one, ranks=2)) for one in (False, True))
    assert forgotten > 0.1
    assert fed_back < forgotten * 4 / TIMES


def test_what_is_not_finite_is_not_fed_back(workers):
    assert workers.run(after_infinity, ranks=2) == [[True, True]] * 2


def after_infinity(transport):
    """Whether a sum with an infinity has one, and whether the sum behind it is finite."""
    with connect_mesh(parse_layout("dp2"), transport, torch.device("cpu")) as mesh:
        of = QuantisedSums([mesh.world], 2 * BLOCK, torch.empty(0), {"unit": 2 * BLOCK})
        found = []
        for value in (float("inf"), 1.0):
            flat = torch.full((2 * BLOCK,), value)
            own = mesh.world.own_shard(flat)
            of.settle()
            of.start(["unit"], [flat], [own]).result()
            found.append(bool(own.isfinite().all()) == (value == 1.0))
        return found


FED = "method.gradient_dtype=int4", "method.gradient_feedback=true"


@pytest.mark.slow
def test_a_resumed_run_has_what_was_rounded_away(workers, make_job, tmp_path):
    """And one on other ranks says that it has not; one without feedback, that it needs none."""
    layout = "layout=dp2 zero2"
    train_on(workers, make_job("whole", layout, *FED))
    whole = tensors(tmp_path / "whole", 20)
    assert {kind for kind, _ in whole} > {"weight", "feedback"}
    forget(shutil.copytree(tmp_path / "whole", tmp_path / "again"), 20)
    train_on(workers, make_job("again", layout, *FED))
    assert_same_bits(whole, tensors(tmp_path / "again", 20))
    told = {}
    for name, words in {
        "other": ("layout=dp3 zero2", *FED),
        "none": (layout, "method.gradient_dtype=int4"),
    }.items():
        forget(shutil.copytree(tmp_path / "whole", tmp_path / name), 20)
        train_on(workers, make_job(name, *words))
        told[name] = (tmp_path / name / "log.txt").read_text()
        assert losses(tmp_path / name)[20] != losses(tmp_path / "whole")[20]
    assert "rounded away before was not saved by these ranks, and is forgotten" in told["other"]
    assert "the checkpoint's feedback is left out: this run has none" in told["none"]
    assert "note  " not in (tmp_path / "again" / "log.txt").read_text()


# -- what is refused -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("dp2 zero1", "reduced to shares; use a layout such as dp2 zero2, or gradient_dtype=bf16"),
        ("dp2 zero3 accumulate=whole", "is of gradients that are reduced to shares"),
        ("dp1 zero2", "is of gradients that are reduced to shares"),
        ("dp2 tp2 zero2", "is built for dp alone, and the layout has tp2"),
        ("dp2 cp2 zero3", "the layout has cp2"),
        ("pp2 dp2 zero2 x2", "the layout has pp2"),
        ("dp4 ep2 zero2", "the layout has ep2"),
        ("dp4 zero2 shard2", "with shard2 is not built; use hpz for nodes, or drop shard"),
        ("dp2 zero2 gradients=host optimizer=host", "with gradients=host is not built"),
    ],
)
def test_sums_in_four_bits_are_refused_where_they_are_not_built(words, said):
    (problem,) = own_problems(parse_layout(words), INT4)
    assert problem.startswith("method.gradient_dtype=int4") and said in problem


@pytest.mark.parametrize(
    ("method", "said"),
    [
        (Method("bf16", gradient_feedback=True), "gradient_dtype is full; use gradient_dtype=int4"),
        (
            Method("fp16", gradient_dtype="int4", gradient_feedback=True),
            "under method.precision=fp16 their scale changes between; use precision=bf16",
        ),
    ],
)
def test_feedback_is_refused_where_there_is_nothing_to_feed_back(method, said):
    (problem,) = own_problems(parse_layout("dp2 zero2"), method)
    assert problem.startswith("method.gradient_feedback") and said in problem


def test_sums_in_four_bits_have_no_algorithm_and_no_card():
    case = narrow_case("dp2 zero2 x2")
    chosen = replace(case.plan, comm=Comm(Algorithms(all_to_all="pairwise")))
    (problem,) = choice_misfits(chosen)
    assert "gradient_dtype=int4" in problem
    assert cuda_problem(case.plan) == HOPS_ON_CUDA
    with pytest.raises(UserError, match="use gradient_dtype=full, or precision=float32"):
        print(replace(case, method=Method("float64", gradient_dtype="int4")).plan)
