"""Measuring a case: all contestants in the same processes, block after block in turn.

    repeat 0 (warm-up)   howdah  DDP  Accelerate  bound  ...
    repeat 1             DDP  Accelerate  bound  ...  howdah
    repeat 2             Accelerate  bound  ...  howdah  DDP
    ...

Whatever the machine does meanwhile happens to neighbours alike, so speeds are compared within a
repeat and never across a run. Each repeat begins with another contestant.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time

import torch
import torch.distributed as dist
from cases import Case, batch
from contestants import Contestant
from howdahs import HowdahStep, Place
from peers import Step

from howdah.comm.spawn import Workers
from howdah.comm.transport import Transport
from howdah.text.batches import Micro

HOST, LOOPBACK = "127.0.0.1", "lo"

WARM_UP = 1  # repeats that are not counted
POOL = 16  # batches made before the clock starts; contestants read them in the same order


@dataclass(frozen=True)
class Block:
    """One contestant's turn: its seconds, and its loss at each step, None where a rank has none.

    busy     processor seconds of all threads of a rank. They stay when the clock is disturbed
             by a neighbour, and what they leave of the clock is waiting.
    seen     bytes that an interface of the rank's machine has sent meanwhile, for all its ranks
    counted  bytes that howdah says it sent, over all ranks; None for the others
    """

    seconds: float
    busy: float
    losses: tuple[float | None, ...]
    seen: int
    counted: int | None


Blocks = dict[str, list[Block]]  # contestant → its turns, warm-up first


def measure(case: Case, contestants: Sequence[Contestant]) -> Blocks:
    """Runs a case in fresh processes. A block took as long as its slowest rank."""
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    with Workers(case.ranks, threads=1) as workers:
        ranks: list[Blocks] = workers.run(_on_each_rank, case, contestants, store.port)
    return {
        name: [together(turns) for turns in zip(*(rank[name] for rank in ranks), strict=True)]
        for name in ranks[0]
    }


def together(turns: Sequence[Block]) -> Block:
    """A turn from those of all ranks, whose first machine's bytes are taken."""
    losses = zip(*(turn.losses for turn in turns), strict=True)
    known = [[loss for loss in each if loss is not None] for each in losses]
    counts = [turn.counted for turn in turns if turn.counted is not None]
    return Block(
        seconds=max(turn.seconds for turn in turns),
        busy=sum(turn.busy for turn in turns) / len(turns),
        losses=tuple(sum(each) / len(each) if each else None for each in known),
        seen=turns[0].seen,
        counted=sum(counts) if counts else None,
    )


def _on_each_rank(
    transport: Transport, case: Case, contestants: Sequence[Contestant], port: int
) -> Blocks:
    store = dist.TCPStore(HOST, port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=transport.rank, world_size=transport.size)
    place = Place(transport, store)
    steps = {one.name: one.build(case, place) for one in contestants}
    assert torch.get_num_threads() == 1
    blocks = by_turns(case, steps, transport.rank, LOOPBACK)
    dist.destroy_process_group()
    return blocks


def by_turns(case: Case, steps: Mapping[str, Step], rank: int, interface: str) -> Blocks:
    """The turns of this rank, whose machine's `interface` is looked at. All ranks call together."""
    replica = case.replica(rank)
    pool = [batch(case, step=number, rank=replica) for number in range(POOL)]
    blocks: Blocks = {name: [] for name in steps}
    names = list(steps)
    for repeat in range(WARM_UP + case.blocks):
        at = repeat % len(names)
        for name in names[at:] + names[:at]:
            first = repeat * case.steps
            stretch = [pool[number % POOL] for number in range(first, first + case.steps)]
            blocks[name].append(_block(steps[name], stretch, interface))
    return blocks


def _block(step: Step, stretch: Sequence[Sequence[Micro]], interface: str) -> Block:
    """The interface is read while no rank is in its steps; two barriers go through it as well."""
    dist.barrier()
    seen, sent = _through(interface), _sent(step)
    dist.barrier()
    began, busy = perf_counter(), process_time()
    losses = tuple(step(micros) for micros in stretch)
    seconds, busy = perf_counter() - began, process_time() - busy
    dist.barrier()
    seen, after = _through(interface) - seen, _sent(step)
    counted = None if sent is None or after is None else after - sent
    return Block(seconds, busy, losses, seen, counted)


def _sent(step: Step) -> int | None:
    return step.sent() if isinstance(step, HowdahStep) else None


def _through(interface: str) -> int:
    """Bytes that an interface of this machine has sent; those of its loopback are received as well,
    and counted once.
    """
    lines = Path("/proc/net/dev").read_text(encoding="utf-8").splitlines()
    rows = (line.split(":") for line in lines if ":" in line)
    return next(int(row[1].split()[8]) for row in rows if row[0].strip() == interface)
