"""When sums start and complete, on lists by hand and on those of random plans."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from random_plans import plans

from howdah.plan.sum_order import SumOrder
from howdah.plan.sums import Span, Sum, completed, sums_of


class Noted:
    """Notes what it is told to do; `slots` of the window are free."""

    def __init__(self, slots=99):
        self.slots, self.did = slots, []
        self.sums = None

    def open(self, number, *, add):
        self.slots += add
        if not self.slots:
            return False
        self.slots -= 1
        self.did.append(f"open {number}")
        return True

    def start(self, number):
        self.did.append(f"start {number}")

        def complete():
            self.did.append(f"end {number}")
            if self.sums and self.sums[number].in_window:
                self.slots += 1

        return complete

    def since(self):
        did, self.did = self.did, []
        return did


def one(unit, *names, op="all_reduce", axis="dp", stage=0, ranks=(0, 1), **fields):
    return Sum(stage, axis, ranks, op, (Span(unit, 0, 8),), names=names, **fields)


def begin(*sums, slots=99, stage=0):
    noted = Noted(slots)
    noted.sums = sums
    return SumOrder(sums, noted), noted


def ready(order, *names):
    for name in names:
        order.ready(name)


WHOLE = [one("head", "norm", "head"), one("layers.1", "q", "k"), one("layers.0", "u")]


def test_a_sum_starts_with_its_last_gradient():
    order, noted = begin(*WHOLE)
    order.arm(0)
    ready(order, "norm")
    assert noted.since() == []
    ready(order, "head")
    assert noted.since() == ["start 0"]


def test_sums_start_in_one_order_whatever_is_ready_first():
    """All ranks must agree on the order, and backward may finish branches in any."""
    order, noted = begin(*WHOLE)
    order.arm(0)
    ready(order, "u", "q", "norm", "head")
    assert noted.since() == ["start 0"]
    ready(order, "k")
    assert noted.since() == ["start 1", "start 2"]
    order.finish(0)
    assert noted.since() == ["end 0", "end 1", "end 2"]


def test_finish_starts_what_backward_never_reached():
    order, noted = begin(*WHOLE)
    order.arm(0)
    ready(order, "norm", "head", "u")
    order.finish(0)
    assert noted.since() == ["start 0", "start 1", "start 2", "end 0", "end 1", "end 2"]


def test_micro_batches_but_the_last_sum_nothing():
    order, noted = begin(*WHOLE)
    ready(order, "norm", "head", "q", "k", "u")
    order.finish(0)
    assert noted.since() == []
    for _ in range(2):
        order.arm(0)
        ready(order, "norm", "head", "q", "k", "u")
        order.finish(0)
        assert Counter(noted.since()) == Counter(
            f"{verb} {n}" for verb in ("start", "end") for n in range(3)
        )


def test_stages_do_not_wait_for_each_other():
    order, noted = begin(one("a", "x", stage=0), one("b", "y", stage=3))
    order.arm(3)
    ready(order, "x", "y")
    order.finish(3)
    assert noted.since() == ["start 1", "end 1"]


def test_terms_of_tp_land_when_those_of_the_next_unit_start():
    tp = {"axis": "tp", "packed": True}
    order, noted = begin(
        one("head", "norm", **tp),
        one("layers.1", "n1", **tp),
        one("layers.0", "n0", **tp),
        one("head", "head", after=(0,)),
        one("layers.1", "q1", after=(1,)),
        one("layers.0", "q0", after=(2,)),
    )
    order.arm(0)
    ready(order, "norm", "head")
    assert noted.since() == ["start 0"]
    ready(order, "q1", "n1")
    assert noted.since() == ["end 0", "start 3", "start 1"]
    ready(order, "q0")
    order.finish(0)
    assert noted.since() == [
        *("end 1", "start 4", "start 2", "end 2", "start 5", "end 3", "end 4", "end 5"),
    ]


def test_a_sum_across_copies_is_chained_on_the_one_within():
    order, noted = begin(
        one("a", "x", op="reduce_scatter"),
        one("b", "y", op="reduce_scatter"),
        one("a", after=(0,), ranks=(0, 2)),
        one("b", after=(1,), ranks=(0, 2)),
    )
    order.arm(0)
    ready(order, "x")
    assert noted.since() == ["start 0", "start 2"]
    order.finish(0)
    assert noted.since() == ["start 1", "start 3", "end 0", "end 1", "end 2", "end 3"]


SHARES = [
    one("a", "x", op="reduce_scatter", every_micro=True),
    one("b", "y", op="reduce_scatter", every_micro=True),
    one("a", after=(0,), ranks=(0, 2)),
    one("b", after=(1,), ranks=(0, 2)),
]


def test_shares_land_when_their_slot_is_needed():
    order, noted = begin(*SHARES, slots=2)
    order.open(0)
    ready(order, "x")
    order.open(1)
    ready(order, "y")
    order.finish(0)
    assert noted.since() == ["open 0", "start 0", "open 1", "start 1"]
    order.open(0)
    assert noted.since() == ["end 0", "open 0"]


def test_shares_are_summed_across_copies_after_the_last_micro_batch_alone():
    order, noted = begin(*SHARES, slots=2)
    for last in (False, True):
        if last:
            order.arm(0)
        for number, name in enumerate("xy"):
            order.open(number)
            ready(order, name)
        order.finish(0)
    did = noted.since()
    assert [what for what in did if what.startswith("start")] == [
        *("start 0", "start 1", "start 0", "start 1"),
        *("start 2", "start 3"),
    ]
    assert did.index("start 2") > len(did) - 1 - did[::-1].index(
        "end 0"
    )  # not before all have ended


def test_a_slot_is_added_where_none_will_ever_be_free():
    order, noted = begin(*SHARES, slots=0)
    order.open(0)
    assert noted.since() == ["open 0"]


def test_the_sums_of_tied_stages_start_on_their_own_word():
    order, noted = begin(
        one("tied", "x", op="reduce_scatter"),
        one("tied", stage=None, axis="pp", after=(0,)),
        one("tied", stage=None, op="all_gather", after=(1,)),
    )
    for _ in range(2):
        order.arm(0)
        ready(order, "x")
        order.finish(0)
        assert noted.since() == ["start 0", "end 0"]
        order.begin_tied()
        assert noted.since() == ["start 1", "start 2"]
        order.finish_tied()
        assert noted.since() == ["end 1", "end 2"]


@settings(max_examples=60)
@given(plans(), st.data())
def test_of_any_plan_every_sum_starts_as_often_as_it_should(plan, data):
    """In whatever order the gradients of a stage become ready, and with some that never do."""
    rank = data.draw(st.integers(0, plan.layout.world - 1))
    sums, noted = sums_of(plan, rank), Noted(data.draw(st.integers(0, 3)))
    noted.sums = sums
    order, stages = SumOrder(sums, noted), completed(plan, rank)
    window = {span.unit: n for n, s in enumerate(sums) if s.in_window for span in s.spans}
    micros = 3
    for micro in range(micros):
        for stage, buffers in stages.items():
            if micro == micros - 1:
                order.arm(stage)
            names = [(buffer.unit, name) for buffer in buffers for name in buffer.names]
            for unit, name in data.draw(st.permutations(names)):
                if data.draw(st.integers(0, 9)):
                    if unit in window:
                        order.open(window[unit])
                    order.ready(name)
            order.finish(stage)
    order.begin_tied()
    order.finish_tied()
    started = [int(what.split()[1]) for what in noted.did if what.startswith("start")]
    ended = [int(what.split()[1]) for what in noted.did if what.startswith("end")]
    wanted = Counter({n: micros if s.every_micro else 1 for n, s in enumerate(sums)})
    assert Counter(started) == Counter(ended) == wanted
    for number, s in enumerate(sums):  # never before the last run of what it awaits has started
        for before in s.after:
            if not s.every_micro:
                last = len(started) - 1 - started[::-1].index(before)
                assert last < started.index(number)
    lanes = {}
    for number in started[-len(sums) :] if not window else []:
        s = sums[number]
        assert lanes.get((s.stage, s.axis, s.ranks), -1) < number
        lanes[s.stage, s.axis, s.ranks] = number
