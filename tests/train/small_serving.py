"""Runs with `method.sync`, their servers in this process, and their replay from the ledgers."""

import socket
from contextlib import contextmanager
from threading import Event, Thread

import torch

from howdah.comm.transport import SingleRank
from howdah.parallel.apply import apply
from howdah.parallel.flat_params import index_of_piece
from howdah.parallel.mesh import connect_mesh
from howdah.server.ledger import replay
from howdah.server.shard import Term
from howdah.server.way import Way
from howdah.text.batches import Rows, micros, order_of
from howdah.train import serving
from howdah.train.served import Server, chunks_for, pace_of, run_hello
from howdah.train.step import StepContext, accumulate, count_tokens

SECRET = bytes(32)


def served(job):
    """Trains; the lines that were said."""
    said = []
    assert serving.train_served(job, show=said.append) == 0
    return said


def server_of(job, number, listener):
    start = serving.start_of(job, -1, serving.corpus_of(job))
    return Server(job, number, start=start, listener=listener, secret=SECRET)


@contextmanager
def serving_here(job):
    """The servers of a job, on threads of this process, and how workers reach them."""
    over = Event()
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(job.layout.server)]
    servers = [server_of(job, number, one) for number, one in enumerate(listeners)]

    def look(host):
        while not over.is_set():
            host.look(0.01)

    threads = [Thread(target=look, args=(one.host,)) for one in servers]
    for thread in threads:
        thread.start()
    try:
        yield servers, Way([one.getsockname() for one in listeners], SECRET, run_hello(job))
    finally:
        over.set()
        for thread, one, listener in zip(threads, servers, listeners, strict=True):
            thread.join()
            one.host.close()
            listener.close()


def places(server, chunk):
    """Yields the weights of which a chunk has a part: the name, its elements of the flat tensor,
    and their range in the chunk.
    """
    for piece, a, b in server._pieces(chunk):
        yield piece.name, index_of_piece(piece)(torch.arange(b - a)), slice(a, b)


def replay_run(job, ledgers):
    """What the ledgers of a run say that its weights are, computed in this process."""
    corpus = serving.corpus_of(job)
    start, servers = serving.start_of(job, -1, corpus), []
    for number in range(job.layout.server):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            servers.append(server_of(job, number, listener))
    chunks, pace = chunks_for(job), pace_of(job, start)
    order = order_of(corpus, sequence=job.data.sequence_length, seed=job.seed)
    single = serving.alone(job)
    with connect_mesh(single.layout, SingleRank(), torch.device("cpu")) as mesh:
        placed = apply(single.plan, mesh=mesh, fill=start.fill)
        context = StepContext(placed, mesh, single.method, job.seed)
        weights, gradients = (
            {name: view for unit in placed.units.values() for name, view in of(unit).items()}
            for of in (lambda u: u.views(u.weights), lambda u: u.views(u.gradients))
        )

        def gradient(step, pulled):
            place, _, clock = step
            for (server, one), flat in pulled.items():
                for name, index, inside in places(servers[server], chunks[server][one]):
                    weights[name].view(-1)[index] = flat[inside]
            rows = Rows(job.plan.micro_batch, job.method.sync.workers, place)
            first, size = pace.first(clock), pace.size(clock)
            batch = micros(corpus, order, rows, first=first, size=size)
            accumulate(context, batch, step=clock, tokens=1.0)
            terms = {}
            for at, flat in pulled.items():
                summed = torch.zeros_like(flat)
                for name, index, inside in places(servers[at[0]], chunks[at[0]][at[1]]):
                    summed[inside] = gradients[name].view(-1)[index]
                terms[at] = Term(summed, float(count_tokens(batch)))
            return terms

        replay(ledgers, [server.desk.shard for server in servers], gradient)
    return whole(servers)


def whole(servers):
    """The whole weights of servers, as `small_runs.tensors` has them."""
    found = {}
    for server in servers:
        for chunk, master in zip(server.desk.shard.chunks, server.desk.shard.masters, strict=True):
            for piece, a, b in server._pieces(chunk):
                flat = found.setdefault(
                    ("weight", piece.name), torch.zeros(piece.shape, dtype=master.dtype)
                )
                flat.view(-1)[index_of_piece(piece)(torch.arange(b - a))] = master[a:b]
    return found


def apart(one, other):
    """How far weights are from others at most, relative to the largest of each."""
    assert one.keys() == other.keys()
    return max(float((one[n] - t).abs().max() / t.abs().max()) for n, t in other.items())
