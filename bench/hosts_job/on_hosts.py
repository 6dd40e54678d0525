"""A rank on a host of the box: all contestants of a job, by turns.

    howdah            over its own connections between hosts, shared memory inside them
    howdah over gloo  the same step, whose messages between hosts are gloo's (comm.wire)
    howdah, rings     but for zero3: long sums and gathers in rings of four pieces, which
                      comm.algorithm = "auto" takes where one rank of each host talks to the others
    howdah, broadcasts  of zero3: units come by a broadcast from each owner (gather=broadcast)
    DDP, FSDP2, ...   torch's, over gloo
    bound             the same computing, and nothing is exchanged

Rank 0's answer has the turns of all contestants; each rank writes a trace of howdah's last steps.
"""

import json
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from contestants import Contestant
from dtensor_peer import dtensor
from howdahs import HowdahStep, Place, alone, silent
from jobs import Job
from measure import by_turns
from ours import part_alone
from peers import ddp, fsdp2

from howdah.comm.rendezvous import join
from howdah.comm.transport import Transport
from howdah.plan.comm import Algorithms, Hosts
from howdah.plan.layout import parse_layout
from howdah.plan.trace_file import write_trace

CARD = "eth0"
TRACE = Path("/tmp/trace")  # of a host's own
OURS, BROADCASTS, RINGS = "howdah", "howdah, broadcasts", "howdah, rings"
RING = "default to 128 KiB, segmented_ring pieces=4"


@dataclass(frozen=True)
class OnHosts(Place):
    """A process among the ranks, and howdah's wires by contestant."""

    wires: dict[str, Transport]


def entrants(job: Job) -> list[Contestant]:
    """Those of a job, in the order of the first repeat."""
    at, made = (job.layout,), partial(Contestant, stages=(job.layout,))
    ours = [made(name, "variant" if name != OURS else "ours", build=over(name)) for name in WIRES]
    if "zero3" not in job.layout:
        ours.append(made(RINGS, "variant", build=by_rings))
    else:
        ours.append(made(BROADCASTS, "variant", build=by_broadcasts))
    sharded = partial(fsdp2, once=False, release="zero3" in job.layout)
    peers: dict[str, Callable[..., object]] = {"DDP": ddp, "FSDP2": sharded}
    if "tp" in job.layout:
        peers = {f"DTensor and {name}": partial(dtensor, over=name) for name in peers}
    bound = part_alone if "tp" in job.layout else silent if "zero" in job.layout else alone
    theirs = [Contestant(name, "peer", at, build) for name, build in peers.items()]
    return [*ours, *theirs, Contestant("bound", "bound", at, bound)]


def over(name: str) -> Callable[[Job, OnHosts], HowdahStep]:
    """What builds howdah's step over one of its wires."""
    return lambda job, place: HowdahStep(job, job.parsed, place.wires[name])


def by_broadcasts(job: Job, place: OnHosts) -> HowdahStep:
    """howdah's step, whose gathers are broadcasts."""
    return HowdahStep(job, parse_layout(f"{job.layout} gather=broadcast"), place.wires[OURS])


def by_rings(job: Job, place: OnHosts) -> HowdahStep:
    """howdah's step, whose long sums and gathers go around."""
    rings = Algorithms(all_reduce=RING, reduce_scatter=RING, all_gather=RING)
    return HowdahStep(job, job.parsed, place.wires[OURS], rings)


WIRES = {
    OURS: Hosts(),
    "howdah over gloo": Hosts(wire="gloo", trust="network"),
}


def rank_main(job: Job) -> None:
    """Takes part in a job."""
    torch.set_num_threads(1)
    with ExitStack() as stack:
        wires = {
            name: stack.enter_context(closing(join(hosts=hosts))) for name, hosts in WIRES.items()
        }
        wire = wires[OURS]
        store = dist.PrefixStore("torch", wire.among.aside)
        dist.init_process_group("gloo", store=store, rank=wire.rank, world_size=wire.size)
        place = OnHosts(wire, store, wires)
        steps = {one.name: one.build(job, place) for one in entrants(job)}
        turns = by_turns(job, steps, wire.rank, CARD)
        ours = steps[OURS]
        assert isinstance(ours, HowdahStep)
        write_trace(TRACE, wire.rank, ours.trace())
        told = {name: [asdict(turn) for turn in some] for name, some in turns.items()}
        print(json.dumps(told), flush=True)
        dist.destroy_process_group()
