"""The verdict: proved when all agree, and each thing that can be wrong is told in words."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from small_cases import case_of

from howdah.plan.recording import Traffic
from howdah.verify.case import full_case, miniature
from howdah.verify.compare import Difference
from howdah.verify.evidence import gather, read, spelled
from howdah.verify.launched import gathered
from howdah.verify.verify import Verdict, report, verify


def test_a_right_layout_is_proved_and_every_control_is_noticed(workers):
    verdict = verify(case_of("dp2 x2"), workers)
    assert verdict.proved and verdict.problems == []
    assert [name for name, _ in verdict.controls] == [
        *("a sum skipped", "a wrong count", "a norm counted twice", "a shifted micro-batch")
    ]
    noticed = dict(verdict.controls)
    assert noticed["a sum skipped"].what == "gradient of embedding.weight"
    assert noticed["a norm counted twice"].what.startswith("gradient norm")
    assert all(failing.used > 1e4 for failing in noticed.values())


def test_controls_can_be_left_out(workers):
    assert verify(case_of("dp2 x1", steps=1), workers, controls=False).controls == []


def test_the_miniature_and_the_run_itself_are_proved(workers, make_job):
    job = make_job("a", "layout=dp2", "batch.micro_batch=2")
    small = verify(miniature(job, precision="float64", steps=2), workers)
    assert small.proved, small.problems
    full = verify(full_case(job, precision="float64", steps=2), workers)
    assert full.proved, full.problems
    assert full.case.samples == 6


def tell_forged(transport, case):
    """The problems that rank 0 sees when rank 1 tells of another weight and more bytes."""
    mine = gather(transport, case)
    if mine.checksums and transport.rank:
        first = next(iter(mine.checksums))
        sent = {row: count + 1 for row, count in mine.sent.items()}
        mine = replace(mine, checksums={**mine.checksums, first: -1}, sent=sent)
    ranks = gathered(transport.among([0, 1]), mine)
    judge = SimpleNamespace(run=lambda *_, **__: ranks)
    return verify(case, judge, controls=False).problems if transport.rank == 0 else len(ranks)


def test_ranks_that_a_launcher_started_tell_rank_0_their_evidence(workers):
    problems, others = workers.run(tell_forged, case_of("dp2 x1", steps=1), ranks=2)
    assert others == 1
    assert problems[0] == "rank 1 holds other weights than rank 0 after the last step"
    assert problems[1].startswith("rank 1 was predicted to send ") and len(problems) == 2


def test_a_rank_s_evidence_is_the_same_when_it_was_told(workers):
    case = case_of("dp2 zero3 x2")
    mine, other = workers.run(gather, case, ranks=2)
    assert read(spelled(other), mine) == other


@pytest.mark.parametrize(
    ("layout", "world", "small"),
    [
        ("dp4", 4, "dp4 x1"),
        ("dp4", 0, "dp2 x1"),
        ("dp4 tp2 zero1", 8, "dp4 tp2 zero1 x1"),
        ("dp8 tp2", 4, "dp2 tp2 x1"),
        ("dp4 zero2 shard2", 4, "dp4 zero2 shard2 x1"),
    ],
)
def test_a_miniature_has_as_many_replicas_as_there_are_ranks_for(make_job, layout, world, small):
    job = make_job("a", f"layout={layout}", "batch.global_batch=8", "batch.micro_batch=1")
    case = miniature(job, precision="float64", steps=1, world=world)
    assert str(case.layout).replace(f" x{case.layout.micros}", " x1") == small


class Forger:
    """Workers whose evidence is changed before it is judged."""

    def __init__(self, workers, forge):
        self._workers, self._forge = workers, forge

    def run(self, function, *arguments, ranks=None, transport=None):
        return self._forge(self._workers.run(function, *arguments, ranks=ranks))


def judged(workers, forge):
    return verify(case_of("dp2 x1", steps=1), Forger(workers, forge), controls=False)


def test_other_bits_on_a_rank_are_told(workers):
    def forge(ranks):
        first = next(iter(ranks[1].checksums))
        return [ranks[0], replace(ranks[1], checksums={**ranks[1].checksums, first: -1})]

    verdict = judged(workers, forge)
    assert verdict.problems == ["rank 1 holds other weights than rank 0 after the last step"]
    assert not verdict.proved


def test_one_byte_too_many_is_told(workers):
    row = Traffic("dp", "all_gather", "shared")

    def forge(ranks):
        return [ranks[0], replace(ranks[1], sent={**ranks[1].sent, row: ranks[1].sent[row] + 1})]

    (problem,) = judged(workers, forge).problems
    assert problem.startswith("rank 1 was predicted to send {Traffic(axis='dp'")


def test_an_unpredicted_kind_of_traffic_is_told(workers):
    row = Traffic("dp", "broadcast", "shared")

    def forge(ranks):
        return [replace(rank, sent={**rank.sent, row: 8}) for rank in ranks]

    assert len(judged(workers, forge).problems) == 2


def test_the_first_weight_to_diverge_is_named(workers):
    """Backward computes the last weights first: the first that is wrong leads to the cause."""

    def forge(ranks):
        gradients = dict(ranks[0].gradients)
        for name in ("layers.0.attention.q.weight", "layers.1.attention.v.weight"):
            gradients[name] = 2 * gradients[name]
        return [replace(ranks[0], gradients=gradients), ranks[1]]

    (problem,) = judged(workers, forge).problems
    told = "2 of 42 comparisons differ; the first is the gradient of layers.1.attention.v.weight: "
    assert problem.startswith(told)
    assert "; " not in problem.removeprefix(told)  # and it is not named twice


def test_the_first_gradient_is_named_even_if_the_loss_is_off_already(workers):
    def forge(ranks):
        gradients = {name: 2 * value for name, value in ranks[0].gradients.items()}
        return [replace(ranks[0], losses=[1.0], gradients=gradients), ranks[1]]

    (problem,) = judged(workers, forge).problems
    assert problem.startswith("21 of 42 comparisons differ; the first is the loss of step 1: apart")
    assert problem.endswith("; the first of the gradients is the gradient of norm.weight")


def test_a_control_that_goes_unnoticed_is_a_problem(workers, monkeypatch):
    """A mutation that breaks nothing: the comparison must be doubted, not trusted."""
    from howdah.verify import verify as module
    from howdah.verify.mutations import Mutation

    monkeypatch.setattr(module, "mutations", lambda plan, steps: [Mutation("nothing at all")])
    verdict = verify(case_of("dp2 x1", steps=1), workers)
    assert not verdict.proved
    (problem,) = verdict.problems
    assert problem == "the control 'nothing at all' went unnoticed: the bounds prove nothing"
    assert "control: nothing at all: NOT NOTICED" in list(report(verdict))


def test_the_report_shows_the_worst_and_ends_with_the_verdict():
    case = case_of("dp2 x1")
    differences = [
        Difference("loss of step 1", 1e-12, 1e-10),
        Difference("loss of step 2", 2e-12, 1e-10),
        Difference("gradient norm of step 1", 0.0, 1e-10),
        *(Difference(f"gradient of w{n}", n * 1e-13, 1e-10) for n in range(1, 9)),
    ]
    noticed = [("a sum skipped", differences[4])]
    lines = list(report(Verdict(case, differences, [], noticed)))
    assert lines[0] == "dp2 x1 against one device: float64, 2 steps of 3 samples, 20 weights"
    told = [line.split("  ")[-1] for line in lines[2:9]]
    assert told == [
        "loss of step 2",
        "gradient norm of step 1",
        *(f"gradient of w{n}" for n in (8, 7, 6, 5, 4)),
    ]
    assert lines[9:] == [
        "control: a sum skipped: noticed by the gradient of w2",
        "equal: bytes sent and held, bits of all ranks, and every gradient within its bound",
    ]
    doubted = list(report(Verdict(case, differences, ["rank 1 is odd"], [])))
    assert doubted[-1] == "problem: rank 1 is odd"
    assert not any(line.startswith("equal") for line in doubted)


def test_one_process_is_verified_too(workers):
    """Micro-batches and flat buffers can be wrong without any peer."""
    verdict = verify(case_of("single x3", steps=1), workers)
    assert verdict.proved and len(verdict.controls) == 3
