"""What a server of `method.sync` holds, its replicas of others included, is what the plan says."""

from contextlib import ExitStack
from socket import create_server

import pytest
import torch

from howdah.server.clocks import Update
from howdah.server.roll import Roll
from howdah.server.shard import Term
from howdah.sim.kernels import kernels_of
from howdah.sim.memory import memory
from howdah.train import serving
from howdah.train.served import Server


def held(job, number):
    """Bytes of the tensors of a server's process that has served two workers, by component."""
    start, sync = serving.start_of(job, -1, serving.corpus_of(job)), job.method.sync
    found = dict.fromkeys(("weights", "gradients", "moments", "copies"), 0)
    with ExitStack() as doors:
        for shard_number in Roll(job.layout.server, sync.replicas).held_by(number):
            listener = doors.enter_context(create_server(("127.0.0.1", 0)))
            server = Server(job, shard_number, start=start, listener=listener, secret=bytes(32))
            serve(server.desk, workers=sync.workers)
            shard = server.desk.shard
            found["weights"] += sum(master.nbytes for master in shard.masters)
            found["gradients"] += sum(flat.nbytes for flat in shard._sums)
            found["copies"] += sum(copy.nbytes for copy in shard._before.values())
            states = (one for by in shard.optimizers for one in by.state.values())
            tensors = (tensor for state in states for tensor in state.values() if tensor.ndim)
            found["moments"] += sum(tensor.nbytes for tensor in tensors)
    return {name: count for name, count in found.items() if count}


def serve(desk, workers):
    """A step of every worker."""
    for worker in range(workers):
        desk.join(worker)
        for key, master in enumerate(desk.shard.masters):
            desk.pull(worker, 1, clock=0, key=key)
            assert [answer.key for answer in desk.answers()] == [key]
            desk.push(Update(worker, 1, 0, key), Term(torch.ones_like(master), 1.0))


@pytest.mark.parametrize("replicas", [0, 1, 2])
@pytest.mark.parametrize("more", ["", ", compensation = 0.1", "bf16"])
def test_a_server_holds_what_was_planned(make_job, replicas, more):
    method = 'kind = "asp", workers = 2' + more.removesuffix("bf16")
    sync = f"method.sync={{{method}, replicas = {replicas}}}"
    precision = f"method.precision={more if more == 'bf16' else 'float32'}"
    small = ("layout=server3", "method.grad_clip=0.0", "batch.global_batch=2", precision)
    job = make_job("held", sync, *small)
    for number in range(3):
        rank = job.layout.workers + number
        rows = memory(job.plan, rank, kernels_of(job.plan))
        planned = {row.component: row.bytes for row in rows}
        if more == "bf16":  # they are made for each message
            assert "weights" not in planned
            planned["weights"] = planned.pop("masters")
        assert held(job, number) == planned
