"""Profiles: how a framework runs a model on a kind of device, as numbers with their sources.

A time is computed from counted work (`shapes/products.py`, `plan/exchanges.py`, `plan/sums.py`) and
from two tables that hold what cannot be counted. Each value stands with its source: measured,
documented, or fitted and on what.

    profiles/NAME.toml      a framework: what it fuses, launches, overlaps     `Profile`
                            (`like` names another, whose values are taken where it has none)
    profiles/devices.toml   a kind of device: how its matrix products lose     `Curve`
                            speed with small sizes, speed of attention

What `howdah measure` finds on a machine is a profile too, with `Kernel`s in place of a curve
(`sim/measured.py`).
"""

import re
import tomllib
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from howdah.base.bounds import Bound
from howdah.base.errors import UserError, nearest, shown
from howdah.machines.cluster import Device

FOLDER = Path(__file__).parent / "profiles"


@dataclass(frozen=True)
class Curve:
    """How fast one kind of device runs matrix products and attention, beside its best.

    m0, n0, k0   sizes at which a product runs at half of its speed, for each dim
    tile         processors, times the tiles that each computes at a time; 0: whole tiles are not
                 counted
    rows, columns   of a tile
    wave         exponent of the loss to a last wave that is not full
    odd          what is left of the speed where a width is no multiple of 64, of 16, of 8
    traffic      of the bytes that products of experts read and write, the part that adds to their
                 time: with few rows for each expert, weights and their gradients are what takes it
    watts        of the board for which `sustained` holds; less power, less speed
    sustained    factor on the best matrix product's speed while a step runs: power limits
    peak         of 16 bits for which `sustained` holds; 0: of every board of the kind
    low          fraction of the dense peak of the best product in 8 bits and fewer
    attention    fraction of the dense peak of flash attention with heads of 128, forward
    backward     the same for its backward pass, of 2.5 times the operations
    older        factor on both for the second generation of flash kernels
    first        factor on both for the first one, beside the second
    head         size of a head at which attention runs at half of its speed
    call         seconds of a collective beside what its messages take: it starts on all ranks
    """

    m0: float = 0.0
    n0: float = 0.0
    k0: float = 0.0
    tile: float = 0.0
    rows: int = 0
    columns: int = 0
    wave: float = 0.0
    odd: tuple[float, float, float] = (1.0, 1.0, 1.0)
    traffic: float = 0.0
    watts: float = 0.0
    sustained: float = 1.0
    peak: float = 0.0
    low: float = 0.0
    attention: float = 0.0
    backward: float = 0.0
    older: float = 1.0
    first: float = 1.0
    head: float = 0.0
    call: float = 0.0


@dataclass(frozen=True)
class Kernel:
    """How long a kind of matrix product takes, as it was measured on a machine:

        start + operations / speed · (1 + m0/m + n0/n + k0/k)     of m rows, inner k, n columns

    start  seconds
    speed  operations per second of large products
    """

    start: Annotated[float, Bound(0, 1e3)]
    speed: Annotated[float, Bound(0, 1e20, above=True)]
    m0: Annotated[float, Bound(0, 1e9)] = 0.0
    n0: Annotated[float, Bound(0, 1e9)] = 0.0
    k0: Annotated[float, Bound(0, 1e9)] = 0.0

    def seconds(self, operations: float, m: float, k: float, n: float) -> float:
        """Seconds of a product of these sizes, or of several that take `operations` together."""
        lost = 1 + self.m0 / m + self.n0 / n + self.k0 / k
        return self.start + operations / self.speed * lost if operations else 0.0


@dataclass(frozen=True)
class Profile:
    """What a framework does with a plan, beyond what the plan says.

    flash          generation of the flash kernels (1, 2, 3); 0: attention writes the numbers of
                   all pairs of tokens to memory
    stream         passes over the residual stream (tokens × width) in a block's forward pass
    activation     passes over the feed-forward's inner numbers
    heads          passes over queries, keys and values
    square         passes over the numbers of pairs, without flash
    logits         passes over the logits, in 4 bytes, forward and backward together
    copies         passes over tokens on their way to experts and back
    again          passes of a backward pass, for each of the forward pass
    forward, backward   seconds in which the host starts the kernels of a block: no block is faster
    matmul         factor on the speed of matrix products
    quantise       passes over operands that products in 8 bits and fewer are made from
    attention      factor on the speed of flash attention
    routed         seconds in which the host starts the routing of a block of experts, forward
    counts         seconds in which it waits for the number of tokens of each expert, where that
                   is not fixed by a capacity
    tp, cp, ep     fraction of the exchanges of an axis in which computation goes on
    beside         whether a shared expert is computed while tokens go to the others
    once           whether a token goes once to each node that has experts for it, and is copied
                   there; otherwise once for each expert
    pp             whether computation goes on while tensors travel between stages
    overlap        whether sums of gradients run beside the backward pass
    gather         whether weights are gathered beside computation
    sums           bits in which it sums gradients, for published runs; 0: those of masters
    owners         whether each weight is updated whole by one rank, which sends it to the others of
                   its group, tensor after tensor; otherwise ranks have shares that they gather
    slowdown       factor on the time of computation beside communication
    update         factor on the bytes of the optimizer
    step           seconds of a step for what is not listed
    inside, between   factors on the bandwidth of the links inside and between nodes
    straggling     loss for each doubling of the number of nodes
    spread         of five runs on clusters that nothing was fitted to, four took between the
                   predicted time divided and multiplied by this; 0: not known
    selective      what recompute=selective runs again: attention's core, or half of the matrix
                   products and all passes over memory (operators)

    Measured on a machine without accelerator, where the host is the device:

    products       matrix products: forward, gradients of inputs, of weights; (): by the curve of
                   the device
    pairs          attention, forward and backward: m is the keys of a query, k the size of a head,
                   and n their product, because some work is done once for each query and head
    adds           whether the seconds in which the host starts kernels add to those of the kernels
    end_forward, end_backward   what `forward` and `backward` are, for the embedding and the head
    action         seconds of the host for each pass of a micro-batch through a stage
    table          passes over the embedding's table in a backward pass, in 4 bytes
    norm           passes over the residual stream in the head
    loss           of the passes over the logits, the share of the forward pass; 0: as other passes
    chunk          tokens whose logits are kept for the backward pass, which makes the others
                   again; 0: all
    waits          exchanges of a few numbers in a step, for which all ranks wait
    crowd          ranks for each core, where there are more; those that wait give theirs up
    meet           seconds of a message between ranks on one machine beyond its link's latency,
                   because neither computes as evenly as it does alone
    uneven         loss of a step of several ranks for the same reason, whatever they exchange
    """

    name: str = "plain"
    summary: str = ""
    flash: int = 3
    stream: float = 16.0
    activation: float = 0.0
    heads: float = 0.0
    square: float = 8.0
    logits: float = 0.0
    copies: float = 0.0
    again: float = 2.0
    forward: float = 0.0
    backward: float = 0.0
    matmul: float = 1.0
    quantise: float = 0.0
    attention: float = 1.0
    routed: float = 0.0
    counts: float = 0.0
    tp: float = 0.0
    cp: float = 0.0
    ep: float = 0.0
    beside: bool = False
    once: bool = False
    pp: bool = True
    overlap: bool = True
    gather: bool = True
    sums: int = 0
    owners: bool = False
    slowdown: float = 1.0
    update: float = 1.0
    step: float = 0.0
    inside: float = 1.0
    between: float = 1.0
    straggling: float = 0.005
    spread: float = 0.0
    selective: str = "core"
    products: tuple[Kernel, ...] = ()
    pairs: tuple[Kernel, ...] = ()
    adds: bool = False
    end_forward: float = 0.0
    end_backward: float = 0.0
    action: float = 0.0
    table: float = 0.0
    norm: float = 0.0
    loss: float = 0.0
    chunk: int = 0
    waits: float = 0.0
    crowd: float = 1.0
    meet: float = 0.0
    uneven: float = 0.0

    @property
    def ends(self) -> tuple[float, float]:
        """Seconds in which the host starts the kernels of the embedding, or of the head."""
        return self.end_forward, self.end_backward


PLAIN = Profile()  # a memory pass count and nothing else: what is assumed of an unknown framework


def profile_names() -> list[str]:
    """The frameworks that have a profile, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.toml") if path.stem != "devices")


@cache
def load_profile(name: str) -> Profile:
    """The profile of a framework. Raises KeyError for an unknown name."""
    if name not in profile_names():
        raise KeyError(name)
    said = _read(name)
    values = {key: row["value"] for key, row in said.items() if isinstance(row, dict)}
    base = load_profile(said["like"]) if "like" in said else PLAIN
    return replace(base, name=name, summary=said["summary"], **values)


def family_of(name: str) -> str:
    """The profile that stands in for one of which nothing is known: the one that it is like."""
    return str(_read(name).get("like", "generic"))


def profile_of(framework: str) -> Profile:
    """The profile whose `frameworks`, a pattern, is in a framework's name; else `generic`."""
    found = (name for name in profile_names() if _matches(name, framework))
    return load_profile(next(found, "generic"))


def own_profile(device: Device) -> Profile:
    """The profile of howdah's own runs: `plain` where nothing is known of the kind of device,
    without an interval where it is taken to be like another one.
    """
    kind = _kind_of(device)
    if not kind:
        return PLAIN
    own = load_profile("howdah")
    return replace(own, spread=0.0) if "like" in _read("devices")[kind] else own


def named_profile(name: str) -> Profile:
    """The profile that a user asks for. Raises UserError for an unknown name."""
    if name not in profile_names():
        raise UserError(f"no profile is called {shown(name)}{nearest(name, profile_names())}")
    return load_profile(name)


def _matches(name: str, framework: str) -> bool:
    pattern = _read(name).get("frameworks")
    return bool(pattern and re.search(pattern, framework.lower()))


@cache
def _read(name: str) -> dict[str, Any]:
    return tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8"))


@cache
def _curve(kind: str) -> Curve:
    """The curve of a kind of devices; "": nothing is known."""
    if not kind:
        return Curve()
    table = _read("devices")[kind]
    known = {field.name for field in fields(Curve)} & table.keys()
    like = table.get("like", "" if kind == "any" else "any")
    return replace(_curve(like), **{key: table[key]["value"] for key in known})


def _kind_of(device: Device) -> str:
    """The kind whose `names`, a pattern, begins a device's name; "" for others."""
    name = device.name.lower()
    kinds = _read("devices").items()
    found = (kind for kind, table in kinds if "names" in table and re.match(table["names"], name))
    return next(found, "")


def curve_of(device: Device) -> Curve:
    """The curve of a device's kind; a plain one for others."""
    return _curve(_kind_of(device))
