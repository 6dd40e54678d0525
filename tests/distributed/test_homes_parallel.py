"""Parallel equals single: states and activations whose home is the host or the disk, against plain
PyTorch on one device, in float64. The bytes of every move are predicted, and so is what each home
holds; where an update is on the host, its bits are those of an update on the device.

    homes     one kind of state after the other, and all together
    layouts   with zero3 and without; tp, pp, cp, ep; recomputation; copies of the shares
    forms     biases, tied or not, norms, positions
    breaks    of the moves themselves, each of which has to be noticed
"""

from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
import torch
from broken_workers import Broken
from late_streams import PIECE, late_moves
from small_cases import FORMS, case_of, prove

from howdah.parallel import apply as applying
from howdah.parallel import homes as running
from howdah.parallel.homes import Homes
from howdah.plan import homes as planned
from howdah.plan.homes import AXIS
from howdah.plan.method import Optimizer
from howdah.verify import evidence as running_ranks
from howdah.verify import matrix
from howdah.verify.evidence import gather
from howdah.verify.reference import reference
from howdah.verify.verify import verify

SLOW = pytest.mark.slow
ALL = "weights={0} gradients={0} optimizer={0} activations={0}"
HOST, DISK = ALL.format("host"), ALL.format("disk")


@pytest.mark.parametrize("home", ["host", "disk"])
@pytest.mark.parametrize(
    "words",
    [
        ALL,
        *(
            pytest.param(words, marks=SLOW)
            for words in (
                "optimizer={0}",
                "gradients={0} optimizer={0}",
                "weights={0} optimizer={0}",
                "activations={0}",
            )
        ),
    ],
)
def test_each_home_alone_and_all_of_them_equal_one_device(workers, words, home):
    prove(case_of(f"single x2 {words.format(home)}"), workers)


@pytest.mark.parametrize("words", ["single x2", pytest.param("pp2 x3", marks=SLOW)])
def test_an_untied_embedding_is_read_by_its_rows_alone(workers, words):
    """The window has no room for it, which memory and bytes as predicted prove."""
    prove(case_of(f"{words} {HOST}", form="untied"), workers)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("words", ["dp2 x2", "cp2 x1"])
@pytest.mark.parametrize("form", ["laptop", "untied"])
def test_replicas_with_whole_tables_read_their_rows(workers, words, form):
    prove(case_of(f"{words} weights=host optimizer=host", form=form), workers)


@contextmanager
def late_card():
    """What is called a GPU is the CPU, whose moves are late."""
    here = partial(torch.device, "cpu")
    with late_moves(), patch.object(running_ranks, "own_device", lambda *_: here()):
        yield


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "words",
    [
        f"dp2 zero3 x2 {HOST}",
        f"pp2 1f1b x3 {DISK.replace('gradients=disk', 'gradients=host')}",
        *(
            pytest.param(words, marks=SLOW)
            for words in (
                f"dp3 zero3 x2 {DISK}",
                "dp2 zero1 x2 optimizer=host",
                "dp3 zero2 x2 optimizer=disk gradients=host",
                f"dp2 tp2 zero3 x2 {HOST}",
                f"dp2 cp2 zero3 x1 {DISK}",
                f"dp2 zero3 gather=broadcast x2 {HOST}",
            )
        ),
    ],
)
def test_moves_of_a_gpu_that_are_late_equal_one_device(workers, words):
    """Bytes and memory of the plan are those of a GPU, too (`late_streams.py`)."""
    form = "untied" if "pp2" in words else "laptop"
    case = replace(case_of(words, form=form), device="cuda")
    with patch.object(planned, "ROOM", PIECE):
        prove(case, Broken(workers, late_card))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("window", [3, 5])
def test_a_wider_window_of_a_gpu_is_right_too(workers, window):
    """Gathers begin a unit early there, and fetches several."""
    case = case_of(f"dp2 zero3 x2 {HOST}", form="laptop")
    with patch.object(planned, "ROOM", PIECE):
        prove(replace(case, device="cuda", window=window), Broken(workers, late_card))


@pytest.mark.parametrize("precision", ["float64", "bf16"])
def test_what_rows_are_added_through_is_counted(workers, precision):
    words = "single x2 weights=host gradients=host optimizer=disk"
    prove(case_of(words, form="untied", precision=precision), workers)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "words",
    [
        "dp3 zero3 x1 recompute=full",
        "pp2 zb-v x4",
        *(
            pytest.param(words, marks=SLOW)
            for words in (
                "dp2 zero3 x2",
                "dp2 zero3 release=step x2",
                "dp2 zero3 gather=broadcast x2",
                "tp2 sp x2",
                "pp2 1f1b x3",
                "pp2 dp2 zero3 interleaved v2 x3",
                "dp2 cp2 zero3 x1",
                "dp2 x2",
            )
        ),
    ],
)
def test_all_states_on_the_disk_on_every_axis(workers, words):
    homes = "optimizer=disk" if words == "dp2 x2" else DISK
    if "pp2" in words and "zero3" not in words:
        homes = homes.replace("gradients=disk", "gradients=host")
    prove(case_of(f"{words} {homes}", form="untied" if "pp2" in words else "laptop"), workers)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "words",
    [
        "dp3 zero2 x2 optimizer=disk gradients=host",
        "pp2 x3 weights=host optimizer=disk gradients=host",
        *(
            pytest.param(words, marks=SLOW)
            for words in (
                "dp2 zero1 x2 optimizer=host",
                "dp4 zero2 shard2 x2 gradients=host optimizer=host",
                "dp2 tp2 zero3 x2 recompute=selective activations=host",
                "single x2 weights=disk optimizer=host",
            )
        ),
    ],
)
def test_homes_that_differ(workers, words):
    prove(case_of(words), workers, controls="zero2 x2" in words)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("words", ["single x2", "dp2 zero3 x2"])
def test_lower_precisions_equal_one_device_within_their_rounding(workers, words, precision):
    prove(case_of(f"{words} {DISK}", precision=precision), workers)


@pytest.mark.slow
@pytest.mark.parametrize("form", [form for form in FORMS if form != "laptop"])
def test_every_form_equals_one_device(workers, form):
    prove(case_of(f"single x2 {HOST}", form=form, dropout=0.1), workers)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["experts", "capacity"])
def test_experts_and_their_biases_have_homes_too(workers, model):
    prove(matrix.case_of(f"model={model} dp2 ep2 zero3 x2 {DISK}"), workers)


# -- the bits of an update on the device ---------------------------------------------


@pytest.mark.parametrize("precision", ["bf16", pytest.param("float32", marks=SLOW)])
def test_an_update_on_the_host_has_the_bits_of_one_on_the_device(workers, precision):
    """The gradients are clipped, and the masters are compared bit by bit."""
    there, *others = (
        workers.run(gather, case_of(f"dp2 zero3 x2 {words}", precision=precision), ranks=2)
        for words in ("", HOST, DISK)
    )
    for ranks in others:
        for rank, evidence in enumerate(ranks):
            assert evidence.checksums == there[rank].checksums
            assert evidence.losses == there[rank].losses
        assert all(
            (evidence == ranks[0].parameters[name]).all()
            for name, evidence in there[0].parameters.items()
        )


# -- the update that is one step late ------------------------------------------------


def late_case(words, **more):
    case = case_of(words, steps=4, **more)
    optimizer = replace(case.method.optimizer, delay=True)
    return replace(case, method=replace(case.method, optimizer=optimizer))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "words",
    [
        "single x2 optimizer=host",
        "dp2 zero2 x2 gradients=host optimizer=host",
        *(
            pytest.param(words, marks=SLOW)
            for words in (
                "dp2 x2 optimizer=host",
                "dp2 zero3 x2 gradients=host optimizer=host activations=host",
                "pp2 1f1b x3 optimizer=host",
                "tp2 sp x2 gradients=host optimizer=host",
            )
        ),
    ],
)
def test_an_update_that_is_one_step_late_equals_that_of_one_device(workers, words):
    """With a model of one process that follows the same rule, and clips the same gradients."""
    prove(late_case(words), workers)


@pytest.mark.slow
def test_weights_at_home_are_late_too_in_16_bits(workers):
    prove(late_case(f"dp2 zero3 x2 {HOST}", precision="bf16"), workers)


def test_one_step_late_is_another_rule():
    """The first step updates nothing, so the second loss is that of the first weights."""
    late = late_case("single x2 optimizer=host")
    plain = replace(late, method=replace(late.method, optimizer=Optimizer()))
    one, other = reference(late), reference(plain)
    assert one.losses[0] == other.losses[0] and one.losses[1] != other.losses[1]
    assert one.norms[1] != other.norms[1]


# -- breaks --------------------------------------------------------------------------


class Unfetched(Homes):
    """Does not fetch the weights of one unit again: what is in the window is taken for them."""

    def fetch_weights(self, unit, out):
        if unit.buffer.unit == "layers.1" and self.plan.layout.weights == "host":
            return self.copy("weights", "fetch", out, torch.zeros_like(out), of="layers.1")
        return super().fetch_weights(unit, out)


class Overwritten(Homes):
    """Forgets the gradients of the micro-batches before."""

    def add_gradient(self, unit, share, after):
        unit.summed.zero_()
        return super().add_gradient(unit, share, after)


class Misread(Homes):
    """Reads another row for the first token."""

    def fetch_rows(self, name, index):
        wrong = index.clone()
        wrong[0, 0] = (wrong[0, 0] + 1) % self.plan.shape.vocab
        return super().fetch_rows(name, wrong)


class AddedOnce(Homes):
    """Adds one row for a token, though it stands there several times."""

    def add_rows(self, unit, name, index, rows):
        last = {token: at for at, token in enumerate(index.tolist())}
        once = torch.zeros_like(rows)
        once[[*last.values()]] = rows[[*last.values()]]
        return super().add_rows(unit, name, index, once)


class Uncounted(Homes):
    """Moves gradients without counting them."""

    def _counted(self, what, *rest, of):
        return super()._counted(what, *rest, of=of) if what != "gradients" else lambda *_: None


@contextmanager
def moving(kind):
    """With homes of this kind."""
    with patch.object(running, "Homes", kind), patch.object(applying, "homes_of", running.homes_of):
        yield


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("kind", "form"),
    [
        *((kind, "laptop") for kind in (Unfetched, Overwritten, Misread, Uncounted)),
        (AddedOnce, "untied"),
    ],
)
def test_a_break_of_the_moves_is_noticed(workers, kind, form):
    broken = Broken(workers, partial(moving, kind))
    verdict = verify(case_of(f"single x2 {HOST}", form=form), broken, controls=False)
    assert not verdict.proved
    if kind is Uncounted:
        assert all("was predicted to send" in problem for problem in verdict.problems)
        assert AXIS in verdict.problems[0]
