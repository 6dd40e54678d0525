"""What ranks agree on when they have met: the transport of a group, from the Hellos of its ranks.

All ranks come to the same answer, for all have read the same Hellos (`meeting.py`). So a mistake of
one is told to all of them in one sentence. Who writes other Hellos into the store has no say in
whether a proof is asked: each rank goes by its own.
"""

from collections import Counter
from collections.abc import Sequence

from howdah.base.errors import UserError
from howdah.comm.cards import LINK
from howdah.comm.engine import RANKS, Engine
from howdah.comm.meeting import Hello, Kind
from howdah.comm.secret import NO_SECRET
from howdah.comm.torch_transport import TorchTransport
from howdah.plan.recording import Wires

PORTS = (
    "messages go through gloo, which is slower, and on one machine opens ports on 127.0.0.1 that "
    "every user of the machine can reach (docs/security.md)"
)
GLOO = (
    "gloo lets anybody join who reaches its ports: take comm.wire=tcp and a secret, or, on a "
    "network where you trust everybody, comm.trust=network"
)


def wires_of(hellos: Sequence[Hello], *, cards: bool = False) -> Wires:
    """The links of any group of these ranks. A group inside one machine uses shared memory, unless
    the user asked for the torch transport, or a rank cannot use the engine. A group over several
    machines uses TCP, also between ranks of one machine.

    cards  NCCL moves the tensors of GPUs
    """
    machines = list(dict.fromkeys(hello.machine for hello in hellos))
    messages = hellos[0].wanted in ("tcp", "torch") or no_engine(hellos)
    inside = TorchTransport.link if messages else Engine.link
    nodes = tuple(machines.index(hello.machine) for hello in hellos)
    between = "mpi" if hellos[0].wanted == "mpi" else TorchTransport.link
    inside = "mpi" if between == "mpi" else inside
    return Wires(inside, between, nodes=nodes, cards=LINK if cards else "")


def agree(hellos: list[Hello], rank: int = 0) -> tuple[Kind, str]:
    """The kind of transport for all ranks, as `rank` sees it, and a warning if it is not the best
    one (otherwise empty). Raises UserError if the ranks asked for different kinds, or the kind is
    impossible.
    """
    first, own = hellos[0], hellos[rank]
    for peer, hello in enumerate(hellos):
        if hello.problem:
            raise UserError(f"rank {peer} on {hello.host}: {hello.problem}")
        if hello.wanted != first.wanted:
            wishes = first.wanted or "the best transport", hello.wanted or "the best transport"
            raise UserError(f"rank 0 asks for {wishes[0]} and rank {peer} for {wishes[1]}")
        if hello.algorithms != first.algorithms:
            wishes = first.algorithms or "none", hello.algorithms or "none"
            raise UserError(f"rank 0 chooses the algorithm {wishes[0]} and rank {peer} {wishes[1]}")
    if first.wanted in ("tcp", "torch"):
        _require_trust(hellos, first.wanted, own)
        return ("torch" if first.wanted == "torch" else "tcp"), ""
    if first.wanted == "mpi":
        return "mpi", ""
    apart = [rank for rank, hello in enumerate(hellos) if hello.machine != first.machine]
    problem = no_engine(hellos)
    if first.wanted == "engine" and apart:
        raise UserError(
            f"rank {apart[0]} shares no memory with rank 0 (another machine or container): take "
            "transport=torch instead of engine"
        )
    if first.wanted == "engine" and problem:
        raise UserError(f"{problem}; or take transport=torch")
    wire: Kind = "tcp" if own.wire == "tcp" else "torch"
    if apart or (problem and wire == "tcp" and any(hello.secret for hello in hellos)):
        _require_trust(hellos, wire, own)
        until = f"{problem}; until then TCP carries all messages"
        return wire, until if problem else ""
    return ("torch", f"{problem}; until then {PORTS}") if problem else ("engine", "")


def _require_trust(hellos: Sequence[Hello], kind: str, own: Hello) -> None:
    """Raises UserError unless all ranks agree with this one who may join, and how they are told
    from others.
    """
    first = hellos[0]
    for rank, hello in enumerate(hellos):
        if (hello.wire, hello.trust) != (first.wire, first.trust):
            raise UserError(
                f"rank 0 has comm.wire={first.wire} and comm.trust={first.trust}, and rank {rank} "
                f"{hello.wire} and {hello.trust}: give all of them the same"
            )
        if hello.secret != first.secret:
            names = f"rank 0 on {first.host}", f"rank {rank} on {hello.host}"
            has, lacks = names if first.secret else names[::-1]
            raise UserError(f"{has} has a secret (HOWDAH_SECRET_FILE), and {lacks} has none")
    if own.trust == "network":
        return
    if kind == "torch" and len({hello.machine for hello in hellos}) > 1:
        raise UserError(GLOO)
    if kind == "tcp" and not own.secret:
        raise UserError(NO_SECRET)


def no_engine(hellos: Sequence[Hello]) -> str:
    """Why the ranks of one machine cannot use the engine; empty if they can.

    The answer is the same for all machines, so that every rank knows the transport of any group.
    """
    most = max(Counter(hello.machine for hello in hellos).values())
    if most > RANKS:
        return f"the engine joins at most {RANKS} ranks of a machine, not {most}: start fewer"
    return next((hello.why_not for hello in hellos if hello.why_not), "")
