"""Measuring a case: all contestants in the same two processes, block after block in turn.

    repeat 0 (warm-up)   howdah  DDP  Accelerate  bound
    repeat 1 (warm-up)   DDP  Accelerate  bound  howdah
    repeat 2             Accelerate  bound  howdah  DDP
    ...

Whatever the machine does meanwhile happens to neighbours alike, so speeds are compared within a
repeat and never across a run. Each repeat begins with another contestant.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter, process_time

import torch
import torch.distributed as dist
from cases import RANKS, Case, batch
from contestants import CONTESTANTS, Step

from howdah.comm.spawn import HOST, Workers
from howdah.comm.transport import Transport
from howdah.text.batches import Micro

WARM_UP = 2  # repeats that are not counted
POOL = 16  # batches made before the clock starts; contestants read them in the same order


@dataclass(frozen=True)
class Block:
    """One contestant's turn: its seconds, and its loss at each step.

    busy    processor seconds of all threads of a rank. They stay when the clock is disturbed
            by a neighbour, and what they leave of the clock is waiting.
    """

    seconds: float
    busy: float
    losses: tuple[float, ...]


Blocks = dict[str, list[Block]]  # contestant → its turns, warm-up first


def measure(case: Case) -> Blocks:
    """Runs a case in fresh processes. A block took as long as its slower rank."""
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    with Workers(RANKS, threads=1) as workers:
        ranks: list[Blocks] = workers.run(_on_each_rank, case, store.port)
    return {
        name: [_together(turns) for turns in zip(*(rank[name] for rank in ranks), strict=True)]
        for name in CONTESTANTS
    }


def _together(turns: Sequence[Block]) -> Block:
    losses = zip(*(turn.losses for turn in turns), strict=True)
    return Block(
        seconds=max(turn.seconds for turn in turns),
        busy=sum(turn.busy for turn in turns) / len(turns),
        losses=tuple(sum(each) / len(each) for each in losses),
    )


def _on_each_rank(transport: Transport, case: Case, port: int) -> Blocks:
    store = dist.TCPStore(HOST, port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=transport.rank, world_size=transport.size)
    steps = {name: build(case, transport) for name, build in CONTESTANTS.items()}
    assert torch.get_num_threads() == 1
    pool = [batch(case, step=number, rank=transport.rank) for number in range(POOL)]
    blocks: Blocks = {name: [] for name in CONTESTANTS}
    names = list(CONTESTANTS)
    for repeat in range(WARM_UP + case.blocks):
        at = repeat % len(names)
        for name in names[at:] + names[:at]:
            first = repeat * case.steps
            stretch = [pool[number % POOL] for number in range(first, first + case.steps)]
            blocks[name].append(_block(steps[name], stretch))
    dist.destroy_process_group()
    return blocks


def _block(step: Step, stretch: Sequence[Sequence[Micro]]) -> Block:
    dist.barrier()
    began, busy = perf_counter(), process_time()
    losses = tuple(step(micros) for micros in stretch)
    return Block(perf_counter() - began, process_time() - busy, losses)
