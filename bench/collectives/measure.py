"""Measuring a case: all contestants take turns in the same processes, as `howdah bench` does.

    warm-up    every contestant, until its number of calls in a block is known
    repeat 1   engine  arena  Group  gloo  bound
    repeat 2   arena  Group  gloo  bound  engine
    ...

Whatever the machine does meanwhile happens to neighbours alike, and each repeat begins with
another contestant. All of them meet at the engine's barrier before each call.
"""

import torch
import torch.distributed as dist
from cases import Case
from contestants import Carrier, connect, disconnect

from howdah.bench.collectives import BOUND, Blocks, copying, take_turns
from howdah.bench.table import bound_bytes
from howdah.bench.trials import Trial, allocate, make_trial, views
from howdah.comm.engine import Engine
from howdah.comm.spawn import Workers

HOST = "127.0.0.1"


def measure(case: Case, workers: Workers, *, seconds: float) -> dict[str, Blocks]:
    """Blocks by contestant. After `seconds` no further repeat is begun."""
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    arguments = case, store.port, seconds
    return workers.run(_on_each_rank, *arguments, ranks=case.ranks, transport="engine")[0]


def _on_each_rank(engine: Engine, case: Case, port: int, seconds: float) -> dict[str, Blocks]:
    assert torch.get_num_threads() == 1
    carriers = connect(engine, dist.TCPStore(HOST, port, is_master=False), case.algorithm)
    trials = _trials(engine, case, carriers)
    bound = copying(engine, bound_bytes(case.op, case.bytes, case.ranks, shared=True))
    found = take_turns(engine, trials, bound, repeats=case.blocks, block=case.block, limit=seconds)
    disconnect(carriers)
    return found


def _trials(engine: Engine, case: Case, carriers: dict[str, Carrier]) -> dict[str, Trial]:
    """The operation as each contestant makes it; those of like tensors share them."""
    room = case.bytes + 8 * case.ranks
    memory = {arena: allocate(room, engine if arena else None) for arena in (False, True)}
    trials = {}
    for one in case.contestants:
        if one.carrier != BOUND:
            tensors = views(memory[one.arena], case.bytes, getattr(torch, one.dtype), apart=True)
            # a Carrier has what make_trial uses of a Transport
            trials[one.name] = make_trial(carriers[one.carrier], case.op, tensors)
    return trials
