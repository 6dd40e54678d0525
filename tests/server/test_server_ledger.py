"""What asynchronous training computes: against one process, and against its own replay."""

from contextlib import suppress
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from small_servers import (
    UNITS,
    apart,
    chunks_for,
    gradient,
    method_of,
    plain,
    run_in_turns,
    shards_of,
    weights_of,
)

from howdah.base.errors import UserError
from howdah.plan.method import Sync
from howdah.server.clocks import Clocks, Refused, Round, Update
from howdah.server.desk import Desk
from howdah.server.guests import Guest, Hello
from howdah.server.host import Host
from howdah.server.ledger import read_ledger, replay, twice
from howdah.server.messages import WEIGHTS, Fields, fields_of
from howdah.server.shard import Shard, Term

OPTIMIZERS = ("adamw", "adam", "sgd", "rmsprop")


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bsp_is_all_reduce_training_whatever_the_order_of_arrival(name):
    for seed in range(2):
        desks = run_in_turns(Sync("bsp", workers=3), 2, seed, name=name)
        assert apart(weights_of([desk.shard for desk in desks]), plain(3, name)) < 1e-10


@pytest.mark.parametrize("fifo", [False, True])
def test_pulls_that_wait_are_answered_the_most_urgent_first(fifo):
    """Under fifo as they came. So do the letters that wait on one connection."""
    (shard,) = shards_of(Sync("bsp", workers=1), 1)
    desk = Desk(Clocks(Sync("bsp", workers=1), len(shard.chunks)), shard, fifo=fifo)
    desk.join(0)
    keys = [2, 0, 1]
    for key in keys:
        desk.pull(0, 1, clock=0, key=key)
    assert [one.key for one in desk.answers()] == (keys if fifo else sorted(keys))
    host = Host(desk, None, {}, dtype=torch.float64)
    guest = Guest(None, Hello(0, 0, 0), fifo=fifo)
    for key in keys:
        host._post(guest, WEIGHTS, Fields(0, key), torch.zeros(2048))
    left = [fields_of(one.fields).key for _ in keys for one in guest.outbox.take()]
    assert left == (keys if fifo else sorted(keys))


def test_ssp_with_bound_0_is_bsp():
    runs = [
        run_in_turns(Sync(*rule, 3), 2, seed)
        for rule in (("ssp", 0), ("bsp", 0))
        for seed in (1, 2)
    ]
    first, *others = [weights_of([desk.shard for desk in desks]) for desks in runs]
    assert [apart(first, other) for other in others] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("rule", [("bsp", 0), ("ssp", 2), ("asp", 0)])
def test_one_worker_is_local_training(rule):
    desks = run_in_turns(Sync(*rule, workers=1), 2, seed=0)
    assert apart(weights_of([desk.shard for desk in desks]), plain(1)) < 1e-10


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "sync",
    [
        Sync("asp", workers=3),
        Sync("ssp", 1, workers=3),
        Sync("ssp", 3, workers=4),
        Sync("asp", workers=3, rate="staleness"),
        Sync("asp", workers=3, compensation=0.1),
    ],
    ids=str,
)
def test_replaying_the_ledgers_gives_the_same_weights(sync, tmp_path):
    for seed in range(3):
        desks = run_in_turns(sync, 2, seed)
        ledgers = []
        for server, desk in enumerate(desks):
            path = tmp_path / f"{server}"
            path.write_text("".join(f"{event}\n" for event in desk.ledger))
            assert twice(desk.ledger) == []
            ledgers.append(read_ledger(path))
        again = shards_of(sync, 2)
        replay(ledgers, again, gradient)
        weights = weights_of([desk.shard for desk in desks])
        assert apart(weights, weights_of(again)) < 1e-10
        assert apart(weights, plain(sync.workers)) > 1e-4  # the order of arrival has mattered


@pytest.mark.parametrize("lost", [0, 1])
def test_an_answer_that_was_lost_and_came_again_newer_is_what_the_worker_had(lost):
    """A server died when it had answered all pulls, and its replica answered one of them again,
    with an update of another worker in between. The replay took the first answers.
    """
    sync, first = Sync("asp", workers=2), shards_of(Sync("asp", workers=2), 2)
    desks = [Desk(Clocks(sync, len(shard.chunks)), shard) for shard in first]
    keys = [(server, key) for server, desk in enumerate(desks) for key in range(desk.clocks.keys)]

    def pull(worker, clock, wanted):
        for server, key in wanted:
            desks[server].pull(worker, 1, clock=clock, key=key)
        return {
            (server, answer.key): answer.weights.clone()
            for server, desk in enumerate(desks)
            for answer in desk.answers()
        }

    def push(worker, clock, pulled):
        for (server, key), term in gradient((worker, 1, clock), pulled).items():
            desks[server].push(Update(worker, 1, clock, key), term)

    for worker in (0, 1):
        assert {desk.join(worker) for desk in desks} == {(1, 0)}
    had = pull(0, 0, keys)
    push(1, 0, pull(1, 0, keys))
    push(0, 0, had | pull(0, 0, [(lost, 0)]))
    pull(0, 0, [(1 - lost, 0)])  # nobody can have used this one
    again = shards_of(sync, 2)
    replay([desk.ledger for desk in desks], again, gradient)
    assert apart(weights_of(first), weights_of(again)) < 1e-10


def test_a_ledger_that_lacks_a_pull_is_not_replayed():
    sync = Sync("asp", workers=2)
    desks = run_in_turns(sync, 1, seed=0)
    cut = [event for event in desks[0].ledger if event != desks[0].ledger[0]]
    with pytest.raises(UserError, match="one of them is missing, or cut"):
        replay([cut], shards_of(sync, 1), gradient)


def test_the_ledger_of_another_run_gives_other_weights():
    """The comparison above can fail."""
    sync = Sync("asp", workers=3)
    one, other = (run_in_turns(sync, 1, seed) for seed in (0, 1))
    again = shards_of(sync, 1)
    replay([one[0].ledger], again, gradient)
    assert apart(weights_of([other[0].shard]), weights_of(again)) > 1e-9


@pytest.mark.parametrize("line", ["", "pull 0 1 2 3", "poll 0 1 2 3 4", "push 0 1 2 3 -4"])
def test_a_line_that_is_none_of_a_ledger_is_told(tmp_path, line):
    path = tmp_path / "ledger"
    path.write_text(f"pull 0 1 0 0 0\n{line}\n")
    with pytest.raises(UserError, match="line 2: not a line of a ledger"):
        read_ledger(path)


# -- chunks and shards


@pytest.mark.parametrize("servers", [1, 2, 3])
def test_chunks_cover_every_unit_once_in_the_order_of_use(servers):
    chunks = chunks_for(servers, most=512)
    covered = {one.unit: torch.zeros(one.length, dtype=torch.int) for one in UNITS}
    for mine in chunks:
        order = [one.unit for one in UNITS]
        assert [order.index(chunk.unit) for chunk in mine] == sorted(
            order.index(chunk.unit) for chunk in mine
        )
        assert all(0 < chunk.length * 8 <= 512 for chunk in mine)
        for chunk in mine:
            covered[chunk.unit][chunk.start : chunk.stop] += 1
    assert all(bool((seen == 1).all()) for seen in covered.values())
    held = [sum(chunk.length for chunk in mine) for mine in chunks]
    assert max(held) - min(held) <= len(UNITS)


def one_chunk(sync):
    (chunk, *_), *_ = chunks_for(1)
    method = replace(method_of(sync, "sgd"), grad_clip=0.0)
    plainest = replace(method.optimizer, momentum=0.0, weight_decay=0.0)
    start = torch.linspace(-1, 1, chunk.length, dtype=torch.float64)
    settings = replace(method, optimizer=plainest)
    return Shard([chunk], [start.clone()], settings, lambda clock: 0.5), start


def test_sums_are_divided_once_by_the_tokens_of_all():
    shard, start = one_chunk(Sync("bsp", workers=2))
    sums = [torch.full_like(start, 6.0), torch.full_like(start, 2.0)]
    updates = tuple(Update(worker, 1, 0, 0) for worker in range(2))
    shard.apply(Round(updates, 0), {0: Term(sums[0], 3.0), 1: Term(sums[1], 1.0)})
    assert torch.equal(shard.masters[0], start - 0.5 * 8.0 / 4.0)


def test_old_weights_divide_the_rate():
    shard, start = one_chunk(Sync("asp", workers=2, rate="staleness"))
    shard.apply(Round((Update(0, 1, 0, 0),), 3), {0: Term(torch.ones_like(start), 1.0)})
    torch.testing.assert_close(shard.masters[0], start - 0.5 / 4)


def test_delay_is_compensated():
    shard, start = one_chunk(Sync("asp", workers=2, compensation=0.25))
    shard.pulled(0, 0)
    shard.pulled(1, 0)
    one = torch.full_like(start, 2.0)
    shard.apply(Round((Update(1, 1, 0, 0),), 0), {1: Term(one, 1.0)})
    moved = shard.masters[0].clone()
    shard.apply(Round((Update(0, 1, 0, 0),), 1), {0: Term(one, 1.0)})
    expected = moved - 0.5 * (2.0 + 0.25 * 4.0 * (moved - start))
    torch.testing.assert_close(shard.masters[0], expected)


def test_the_wishes_of_one_that_has_left_are_forgotten_and_those_of_others_stay():
    sync = Sync("bsp", workers=3)
    desk = Desk(Clocks(sync, 1), one_chunk(sync)[0])
    for worker in range(3):
        desk.join(worker)
        desk.pull(worker, 1, clock=0, key=0)
    desk.leave(0, 1, finished=True)
    desk.clocks.leave(1, 1)  # behind the desk's back
    assert [answer.worker for answer in desk.answers()] == [2] and not desk.wishes
    desk.pull(2, 1, clock=0, key=0)
    with pytest.raises(Refused, match="worker 2 pulls key 0 again, and has not been answered"):
        desk.pull(2, 1, clock=0, key=0)
    with patch.object(desk.shard, "pulled", side_effect=MemoryError), suppress(MemoryError):
        list(desk.answers())
    assert len(desk.wishes) == 1
