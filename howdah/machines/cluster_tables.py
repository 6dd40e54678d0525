"""The tables of a cluster file: which keys there are, what they may be, and the Cluster they make.

The dataclasses at the top, and those of `cluster.py`, are the tables; `base/tables.py` reads them
by their annotations. A file may give the same number twice, for example by naming a known link and
giving its bandwidth, or by giving the bandwidth of a network card and of the node: then both must
agree. A UserError names the file, and each wrong key.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from itertools import pairwise
from math import isclose, prod
from typing import Annotated, Any, Literal

from howdah.base.bounds import Bound, Length, Unit
from howdah.base.errors import UserError, nearest, several, shown
from howdah.base.files import parse_toml
from howdah.base.quantities import spell
from howdah.base.tables import read_table
from howdah.machines.cluster import (
    LINKS,
    WORLD,
    Bandwidth,
    Bytes,
    Cluster,
    Count,
    Device,
    Efficiency,
    Factor,
    Flops,
    Grid,
    Host,
    Level,
    Link,
    Memory,
    Name,
    Network,
    Tree,
)

GRID = 1 << 16  # most devices of a torus or mesh, whose groups are computed one by one

DiskBandwidth = Annotated[float, Unit("bytes/s")]
Dims = Annotated[tuple[Annotated[int, Bound(1, GRID)], ...], Length(1, 32)]  # numpy 1 has no more

# -- the tables of a file ------------------------------------------------------
# A class that is not frozen, compared or printed is made in a quarter of the time.


@dataclass(eq=False, repr=False)
class _Node:
    devices: Count
    count: Count = 1


@dataclass(eq=False, repr=False)
class _Speed:
    bandwidth: Bandwidth | None = None
    latency: Annotated[float, Unit("seconds")] | None = None


@dataclass(eq=False, repr=False, kw_only=True)
class _Wire(_Speed):  # a link in LINKS needs no numbers
    link: Name


@dataclass(eq=False, repr=False, kw_only=True)
class _Cards(_Wire):  # the network cards of a node; node_bandwidth is that of all together
    nics: Count = 1
    node_bandwidth: Bandwidth | None = None


@dataclass(eq=False, repr=False, kw_only=True)
class _Host(_Wire):
    memory: Bytes
    memory_bandwidth: Bandwidth = Host.memory_bandwidth
    disk: Bytes = 0.0
    disk_bandwidth: DiskBandwidth = 0.0


@dataclass(eq=False, repr=False)
class _Network:
    shape: Literal["flat", "spine-leaf", "fat-tree", "torus", "mesh"]
    leaf: Count | None = None
    oversubscription: Factor | None = None
    levels: Annotated[tuple[Level, ...], Length(1, 100)] | None = None
    dims: Dims | None = None
    wraps: Count | None = None
    slices: Annotated[tuple[Dims, ...], Length(0, 100)] | None = None


SHAPES: dict[str, set[str]] = {  # the keys of each shape of network
    "flat": set(),
    "spine-leaf": {"leaf", "oversubscription"},
    "fat-tree": {"levels"},
    "torus": {"dims", "wraps", "slices"},
    "mesh": {"dims"},
}
OPTIONAL = {"wraps", "slices"}


@dataclass(eq=False, repr=False)
class _MeasuredDevice:
    memory: Memory | None = None
    bandwidth: Bandwidth | None = None
    reserved: Bytes | None = None
    flops: Flops = field(default_factory=Flops)


@dataclass(eq=False, repr=False)
class _MeasuredHost:
    link: _Speed = field(default_factory=_Speed)
    disk_bandwidth: DiskBandwidth | None = None


@dataclass(eq=False, repr=False)
class _Measured:  # numbers of a Cluster, by the same names
    device: _MeasuredDevice = field(default_factory=_MeasuredDevice)
    inside: _Speed = field(default_factory=_Speed)
    between: _Speed = field(default_factory=_Speed)
    host: _MeasuredHost = field(default_factory=_MeasuredHost)


@dataclass(eq=False, repr=False)
class _File:
    name: Name
    device: Device
    node: _Node
    host: _Host
    summary: Name = Cluster.summary
    rent: Annotated[float, Unit("USD/h", positive=True)] | None = None
    price_per_hour: Annotated[float, Unit("USD/h", positive=True)] | None = None
    pue: Factor = Cluster.pue
    carbon: Annotated[float, Unit("kg/kWh")] = Cluster.carbon
    inside: _Wire | None = None
    between: _Cards | None = None
    network: _Network = field(default_factory=lambda: _Network("flat"))
    efficiency: Efficiency = Cluster.efficiency
    measured: _Measured = field(default_factory=_Measured)
    profile: Name = Cluster.profile


MEASURABLE = re.compile(r"\b(memory|bandwidth|latency|flops)\b")
MEASURE = (
    "; howdah measure finds memory, rates and latencies of a machine that you have, and writes "
    "such a file"
)
STAND_INS: dict[str, Any] = {  # a sound table of each kind
    "device": {"name": "a", "memory": "1 GB", "bandwidth": "1 GB/s", "flops": {"bf16": "1 FLOP/s"}},
    "node": {"devices": 1},
    "host": {"link": "pcie4", "memory": "1 GB"},
    "inside": {"link": "pcie4"},
    "between": {"link": "hdr"},
}


# -- from a file to a cluster --------------------------------------------------


def parse_cluster(text: str, *, file: str) -> Cluster:
    """Parses the TOML `text` of a cluster file; `file` is its name in error messages.

    Raises UserError with every value that is wrong by itself, and every contradiction of the
    others.
    """
    try:
        raw = parse_toml(text)
    except ValueError as error:
        raise UserError(f"{file} is not TOML: {error}") from None
    found = read_table(_File, raw, limits=True)
    others = [*_contradictions(found.value)] if found.value else _of_the_sound(raw)
    if problems := [*found.problems, *others]:
        lacking = any("missing" in one and MEASURABLE.search(one) for one in problems)
        raise UserError(f"{file}: {several(problems)}{MEASURE * lacking}")
    return _cluster(found.value)


def _of_the_sound(raw: dict[str, Any]) -> list[str]:
    """The contradictions of a file in which tables are wrong or missing: those of the others, with
    stand-ins in their place. A sentence that names a stand-in would be about nothing.
    """
    sound = {
        name: table
        for name, table in raw.items()
        if not read_table(_File, {"name": "", **STAND_INS, name: table}, limits=True).problems
    }
    if "network" in raw and "network" not in sound:
        return []
    instead = {
        name: table
        for name, table in STAND_INS.items()
        if name not in sound and (name in raw or name in ("device", "node", "host"))
    }
    file = read_table(_File, {"name": "", **instead, **sound}, limits=True).value
    told = _contradictions(file) if file else ()
    named = [rf"\b{name}\.|\[{name}\]" + r"|\d nodes" * (name == "node") for name in instead]
    return [one for one in told if not any(re.search(name, one) for name in named)]


def _cluster(file: _File) -> Cluster:
    between = _link(file.between) if file.between else None
    inside = _link(file.inside) if file.inside else between
    assert inside is not None
    host = file.host
    return Cluster(
        name=file.name,
        device=file.device,
        devices_per_node=file.node.devices,
        nodes=file.node.count,
        inside=inside,
        between=between or inside,
        network=_network(file.network),
        host=Host(
            *(host.memory, _link(host), host.disk, host.disk_bandwidth, host.memory_bandwidth)
        ),
        nics=file.between.nics if file.between else 1,
        summary=file.summary,
        rent=file.rent,
        price_per_hour=file.price_per_hour,
        pue=file.pue,
        carbon=file.carbon,
        efficiency=file.efficiency,
        measured=tuple(_given(file.measured)),
        profile=file.profile,
    )


def _link(wire: _Wire) -> Link:
    known = LINKS.get(wire.link, wire)
    assert known.bandwidth is not None and known.latency is not None
    return Link(wire.link, known.bandwidth, wire.latency or known.latency)


def _network(table: _Network) -> Network:
    if table.dims:
        wraps = 0 if table.shape == "mesh" else table.wraps or 1
        return Grid(table.dims, wraps, table.slices or ())
    if table.leaf and table.oversubscription:
        return Tree((Level(table.leaf, table.oversubscription),))
    return Tree(table.levels or ())


def _given(table: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The dotted name and value of each key that a table gives."""
    for key in fields(table):
        value = getattr(table, key.name)
        if is_dataclass(value):
            yield from _given(value, f"{prefix}{key.name}.")
        elif value is not None:
            yield prefix + key.name, value


# -- what does not fit together ------------------------------------------------


def _contradictions(file: _File) -> Iterator[str]:
    yield from _check_device(file.device)
    for name, wire in (("inside", file.inside), ("between", file.between), ("host", file.host)):
        yield from _check_wire(wire, name) if wire else ()
    yield from _check_cards(file.between) if file.between else ()
    yield from _check_network(file.network)
    yield from _check_nodes(file)
    yield from _check_measured(file)


def _check_device(device: Device) -> Iterator[str]:
    if device.flops == Flops():
        yield "device.flops gives no rate; say at least one, such as bf16"
    if device.watts is not None and device.idle > device.watts:
        yield "device.idle is more than device.watts"
    if device.reserved >= device.memory:
        yield "device.reserved leaves nothing of device.memory"


def _check_wire(wire: _Wire, table: str) -> Iterator[str]:
    known = LINKS.get(wire.link, wire)
    if lacking := [key for key in ("bandwidth", "latency") if getattr(known, key) is None]:
        yield (
            f"{table}.{' and '.join(lacking)} {'is' if len(lacking) == 1 else 'are'} missing, and "
            f"link {shown(wire.link)} is none of those with known numbers"
            f"{nearest(wire.link, LINKS)}"
        )
    if wire.bandwidth and known.bandwidth and not isclose(wire.bandwidth, known.bandwidth):
        yield (
            f"{table}.bandwidth is {spell(wire.bandwidth, 'bytes/s')}, but {wire.link} has "
            f"{spell(known.bandwidth, 'bytes/s')} in one direction; drop it, or give the link a "
            "name of its own"
        )


def _check_cards(cards: _Cards) -> Iterator[str]:
    each, total = LINKS.get(cards.link, cards).bandwidth, cards.node_bandwidth
    if each and total and not isclose(total, cards.nics * each):
        yield (
            f"between.node_bandwidth is {spell(total, 'bytes/s')}, but {cards.nics} x {cards.link} "
            f"are {spell(cards.nics * each, 'bytes/s')}; drop it, or correct between.nics"
        )


def _check_network(network: _Network) -> Iterator[str]:
    shape, given = network.shape, {key for key, _ in _given(network)} - {"shape"}
    for key in sorted(given - SHAPES[shape]):
        yield f"network.{key} says nothing about a {shape} network; leave it out"
    for key in sorted(SHAPES[shape] - OPTIONAL - given):
        yield f"network.{key} is missing; a {shape} network needs it"
    for dims in (network.dims or (), *(network.slices or ())):
        if prod(dims) > GRID:
            yield f"network: {_by(dims)} are over {GRID:,} devices together, the most of a {shape}"
    for lower, upper in pairwise(network.levels or ()):
        if upper.nodes % lower.nodes or upper.nodes == lower.nodes:
            yield f"network.levels: {upper.nodes} nodes are not several groups of {lower.nodes}"


def _check_nodes(file: _File) -> Iterator[str]:
    each, nodes, dims = file.node.devices, file.node.count, file.network.dims
    price, rent = file.price_per_hour, file.rent
    if price is not None and rent is not None and not isclose(price, each * rent):
        yield (
            f"price_per_hour is {spell(price, 'USD/h')} of a node, but {each} devices of rent "
            f"{spell(rent, 'USD/h')} are {spell(each * rent, 'USD/h')}; give one of the two"
        )
    if each * nodes > WORLD:
        yield (
            f"{nodes:,} nodes of {each:,} devices are {each * nodes:,}; at most {WORLD:,} are "
            "planned for"
        )
    if dims and GRID >= prod(dims) != each * nodes:
        yield (
            f"network.dims {_by(dims)} are {prod(dims)} devices, but {nodes} nodes of {each} are "
            f"{each * nodes}"
        )
    if file.network.shape in ("torus", "mesh"):
        if file.inside or not file.between:
            yield "in a torus or mesh all wires are alike: give [between], not [inside]"
    elif not file.inside:
        yield "[inside] is missing, the link between the devices of a node"
    elif not file.between and nodes > 1:
        yield f"[between] is missing, the link between the {nodes} nodes"


def _by(dims: tuple[int, ...]) -> str:
    return " x ".join(map(str, dims))


def _check_measured(file: _File) -> Iterator[str]:
    rates = dict(_given(file.device.flops, "device.flops."))
    for name, value in _given(file.measured):
        if file.network.dims and name.startswith("inside."):
            yield f"measured.{name}: in a torus or mesh measure between"
        if name.startswith("device.flops.") and value > rates.get(name, 0):
            yield (
                f"measured.{name} is {spell(value, 'FLOP/s')}, which {name} does not promise; give "
                "its dense rate"
            )
