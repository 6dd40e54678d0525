"""Workers of two ranks over sockets: two connections to a server, one clock, one incarnation."""

import socket

import pytest
from small_servers import (
    STEPS,
    UNITS,
    apart,
    chunks_for,
    plain,
    shards_of,
    summed_gradient,
    tokens_of,
)
from test_wire import HELLO, SECRET, servers, units
from torch.distributed import HashStore

from howdah.plan.method import Sync
from howdah.server.client import Client
from howdah.server.clocks import Clocks
from howdah.server.desk import Desk
from howdah.server.way import ServerGone, Way
from howdah.train.member import Moves


def of_two(chunks):
    """Every second chunk is another rank's."""
    return [chunk._replace(rank=key % 2) for key, chunk in enumerate(chunks)]


def client_of(there, place, rank, moved=None):
    """A rank of a worker, and what it holds."""
    for desk in there.desks:
        desk.shard.chunks = of_two(desk.shard.chunks)
    mine, chunks = units(), [*map(of_two, chunks_for(len(there.desks)))]
    way = Way(there.addresses, SECRET, HELLO, patience=10.0, moved=moved)
    return Client(way, place, chunks, mine, rank=rank), mine


def joined(there, place=0, moved=(None, None)):
    """The ranks of a worker, which have joined as one."""
    told, ranks = [], [client_of(there, place, rank, moved[rank]) for rank in (0, 1)]
    (first, _), (second, _) = ranks
    clock = first.join(max, lambda mine: told.append(mine) or mine)
    assert second.join(max, lambda mine: told[0]) == clock
    return ranks


@pytest.mark.parametrize("kind", ["asp", "bsp"])
def test_two_ranks_are_one_worker(kind):
    with servers(Sync(kind, workers=1)) as there:
        ranks = joined(there)
        for clock in range(STEPS):
            for client, _ in ranks:
                client.clock, client.tokens = clock, tokens_of(0, clock)
                for handle in [client.pull(one.unit)[0] for one in UNITS]:
                    handle.result()
            for one in UNITS:
                whole = ranks[0][1][one.unit].weights.clone()
                for chunks in map(of_two, chunks_for(2)):
                    for chunk in (c for c in chunks if (c.unit, c.rank) == (one.unit, 1)):
                        part = slice(chunk.start, chunk.stop)
                        whole[part] = ranks[1][1][one.unit].weights[part]
                for client, mine in ranks:
                    mine[one.unit].gradients.copy_(summed_gradient(0, clock, whole))
                    client.push(one.unit)
        for client, _ in ranks:
            client.drain()
        for client, _ in ranks:
            client.close()
        assert apart(there.weights, plain(1)) < 1e-10
        for host in there.hosts:
            assert host.counts["joined"] == 1 and host.counts["repeated"] == 0


def test_a_rank_that_does_not_come_back_ends_its_worker():
    with servers(Sync("asp", workers=1), 1) as there:
        (first, _), (second, _) = joined(there)
        for link in second._links:  # it ends without a word
            link._ends = True
            link._frames.sock.shutdown(socket.SHUT_RDWR)
        with pytest.raises(ServerGone, match="incarnation 1 of worker 0 is over"):
            first._links[0]._await(lambda: False)


def test_a_rank_cannot_join_a_worker_that_is_gone_or_push_what_is_another_ranks():
    with servers(Sync("asp", workers=1), 1) as there:
        (first, mine), _ = joined(there)
        late, _ = client_of(there, 0, 1)
        with pytest.raises(ServerGone, match="incarnation 7 of worker 0 is over"):
            late.join(max, lambda mine: [0, 7])
        link = first._links[0]
        link.outbox.post(
            link._letter(0, 1, mine[UNITS[0].unit].gradients[: link._chunks[0].length], 1.0)
        )
        with pytest.raises(ServerGone, match="key 1 is none of rank 0 of worker 0"):
            link._await(lambda: False)


def test_every_rank_of_a_worker_follows_a_server_that_is_elsewhere_now(monkeypatch):
    monkeypatch.setattr("howdah.server.link.LEAVING", 0.1)  # it looks as often
    store = HashStore()
    told = [Moves(store) for _ in range(2)]
    with servers(Sync("asp", workers=1)) as there:
        ranks = [client for client, _ in joined(there, moved=[one.so_far for one in told])]
        told[0].take({"step": 3})
        assert not any(one.so_far() for one in told)
        for times in (1, 2):
            told[0].take({"moved": [1]})
            for client in ranks:
                (left, moved), before = client._links, client._links[1].came_back
                moved._await(lambda: moved.came_back > before)  # noqa: B023 (at once)
                moved._follow()  # it has
                assert (left.came_back, moved.came_back) == (0, times)


def test_a_rank_whose_connection_ends_asks_again_and_the_other_one_need_not():
    sync = Sync("bsp", workers=2)
    shard = shards_of(sync, 1)[0]
    shard.chunks = of_two(shard.chunks)
    desk = Desk(Clocks(sync, len(shard.chunks)), shard)
    for worker in (0, 1):
        desk.join(worker)
        for key in range(len(shard.chunks)):
            desk.pull(worker, 1, clock=1, key=key)
    desk.hang_up(0, 1)
    left = [(wish.worker, shard.chunks[wish.key].rank) for wish in desk.wishes]
    assert {*left} == {(0, 0), (1, 0), (1, 1)}
