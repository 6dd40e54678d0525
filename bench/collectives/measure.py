"""Measuring a case: all contestants in the same processes, block after block in turn.

    warm-up    every contestant, until its number of calls in a block is known
    repeat 1   engine  arena  Group  gloo  bound
    repeat 2   arena  Group  gloo  bound  engine
    ...

Whatever the machine does meanwhile happens to neighbours alike, and each repeat begins with
another contestant. A block is as many calls as take about 0.1 s. Before each call all ranks
write their inputs anew and meet (at the engine's barrier, for all contestants), and only the call
is timed; before each block one call that is not timed is checked, element by element.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
import torch.distributed as dist
from cases import Case, Contestant
from contestants import Carrier, connect, disconnect

from howdah.bench.collectives import Loop, copying, fitting, loop, slowest
from howdah.bench.table import WIDTHS, bound_bytes
from howdah.bench.trials import Memory, Trial, check, make_trial
from howdah.comm.engine import Engine
from howdah.comm.spawn import Workers

HOST = "127.0.0.1"

LEAST = 3  # blocks that are measured however long they take


@dataclass(frozen=True)
class Blocks:
    """A contestant's turns.

    seconds  of a call in each, on the slowest rank; wrong: elements, over all ranks and checks
    """

    seconds: tuple[float, ...]
    calls: int
    wrong: int


def measure(case: Case, workers: Workers, *, seconds: float) -> dict[str, Blocks]:
    """Blocks by contestant. After `seconds` no further repeat is begun."""
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    arguments = case, store.port, seconds
    ranks = workers.run(_on_each_rank, *arguments, ranks=case.ranks, transport="engine")
    return {
        name: Blocks(first.seconds, first.calls, sum(rank[name].wrong for rank in ranks))
        for name, first in ranks[0].items()
    }


def _on_each_rank(engine: Engine, case: Case, port: int, seconds: float) -> dict[str, Blocks]:
    assert torch.get_num_threads() == 1
    began = perf_counter()
    carriers = connect(engine, dist.TCPStore(HOST, port, is_master=False))
    trials = _trials(engine, case, carriers)
    loops: dict[str, Loop] = {
        name: loop(engine, trial.call, trial.given) for name, trial in trials.items()
    }
    loops["bound"] = copying(engine, bound_bytes(case.op, case.bytes, case.ranks, shared=True))
    wrong = {name: check(engine, trial) for name, trial in trials.items()}
    calls = {name: fitting(engine, run, seconds=case.block) for name, run in loops.items()}
    times: dict[str, list[float]] = {name: [] for name in loops}
    names = list(loops)
    for repeat in range(case.blocks):
        (spent,) = slowest(engine, [perf_counter() - began])
        if spent > seconds and repeat >= LEAST:
            break
        at = repeat % len(names)
        for name in names[at:] + names[:at]:
            if name in trials:
                wrong[name] += check(engine, trials[name])
            times[name].append(loops[name](calls[name]) / calls[name])
    slow = {name: tuple(slowest(engine, each)) for name, each in times.items()}
    disconnect(carriers)
    return {name: Blocks(slow[name], calls[name], wrong.get(name, 0)) for name in names}


def _trials(engine: Engine, case: Case, carriers: dict[str, Carrier]) -> dict[str, Trial]:
    """The operation as each contestant makes it; those of like tensors share them."""
    room = case.bytes + 8 * case.ranks
    memory = {}
    for arena in (False, True):
        make = engine.allocate if arena else lambda size, dtype: torch.empty(size, dtype=dtype)
        memory[arena] = [make(room, torch.uint8) for _ in range(2)]
    trials = {}
    for one in _timed(case.contestants):
        dtype, width = getattr(torch, one.dtype), WIDTHS[one.dtype]
        x, out = memory[one.arena]
        views = x[: case.bytes].view(dtype), out[: room // width * width].view(dtype)
        # a Carrier has what make_trial uses of a Transport
        trials[one.name] = make_trial(carriers[one.carrier], case.op, Memory(*views, apart=True))
    return trials


def _timed(contestants: Sequence[Contestant]) -> list[Contestant]:
    return [one for one in contestants if one.carrier != "bound"]
