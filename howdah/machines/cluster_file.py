"""Cluster files: reads a TOML file into a `Cluster`, and checks everything in it.

    h100            a shipped cluster: the file clusters/h100.toml next to this file
    h100x64         the same cluster with 64 devices: 8 nodes
    rooms/ours.toml a file of the user; x64 may follow it too

Quantities are strings with units (`base/quantities.py`). A file may give the same number twice,
for example by naming a known link and giving its bandwidth, or by giving the bandwidth of a network
card and of the node: then both must agree. Each problem is a UserError with the file and the key.
"""

import re
from dataclasses import fields
from itertools import pairwise
from math import isclose, prod
from pathlib import Path
from typing import Any

from howdah.base.errors import UserError, named, nearest, shown
from howdah.base.files import parse_toml, read_text
from howdah.base.quantities import UNITS, parse_quantity, spell
from howdah.machines.cluster import (
    LINKS,
    WORLD,
    Cluster,
    Device,
    Efficiency,
    Flops,
    Grid,
    Host,
    Level,
    Link,
    Network,
    Tree,
    resized,
)

FOLDER = Path(__file__).parent / "clusters"

LARGEST_FILE = 256 << 10  # bytes
LONGEST_TEXT = 200  # characters of a name or a summary
MOST_FACTOR = 1e6
LONGEST_LIST = 100  # dims of a torus or mesh, its slices, levels of switches
GRID = 1 << 16  # most devices of a torus or mesh, whose groups are computed one by one

# The keys of each table, with the kind of their values. "!" marks a required key, "+" a number that
# must be above 0 because something is divided by it.
LINK = {"link": "text !", "bandwidth": "bytes/s +", "latency": "seconds"}
KEYS: dict[str, dict[str, str]] = {
    "": {
        "name": "text !",
        "summary": "text",
        "rent": "USD/h",
        "pue": "factor",
        "carbon": "kg/kWh",
        "device": "table !",
        "node": "table !",
        "inside": "table",
        "between": "table",
        "network": "table",
        "host": "table !",
        "efficiency": "table",
        "measured": "table",
    },
    "device": {
        "name": "text !",
        "memory": "bytes !+",
        "bandwidth": "bytes/s !+",
        "flops": "table !",
        "reserved": "bytes",
        "watts": "watts",
        "idle": "watts",
        "price": "USD",
    },
    "device.flops": {field.name: "FLOP/s +" for field in fields(Flops)},
    "node": {"devices": "count !", "count": "count"},
    "inside": LINK,
    "between": {**LINK, "nics": "count", "node_bandwidth": "bytes/s +"},
    "network": {
        "shape": "text !",
        "leaf": "count",
        "oversubscription": "factor",
        "levels": "list",
        "dims": "list",
        "wraps": "count",
        "slices": "list",
    },
    "host": {"memory": "bytes !", **LINK, "disk": "bytes", "disk_bandwidth": "bytes/s"},
    "efficiency": {field.name: "share" for field in fields(Efficiency)},
}
# The keys of [network] that each shape takes.
SHAPES = {
    "flat": set(),
    "spine-leaf": {"leaf", "oversubscription"},
    "fat-tree": {"levels"},
    "torus": {"dims", "wraps", "slices"},
    "mesh": {"dims"},
}
MEASURABLE = {  # the dotted names that [measured] may contain, with their kinds
    **{f"device.flops.{name}": kind for name, kind in KEYS["device.flops"].items()},
    "device.memory": "bytes +",
    "device.bandwidth": "bytes/s +",
    "device.reserved": "bytes",
    **{f"{table}.bandwidth": "bytes/s +" for table in ("inside", "between", "host.link")},
    **{f"{table}.latency": "seconds" for table in ("inside", "between", "host.link")},
    "host.disk_bandwidth": "bytes/s",
}


def cluster_names() -> list[str]:
    """The names of the clusters that are shipped with howdah, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load_cluster(text: str, *, devices: int | None = None) -> Cluster:
    """Loads the cluster that `text` names, with `devices` devices if that is given.

    Raises UserError for an unknown name, for an unreadable or wrong file, for a size in which the
    cluster does not exist, and for two sizes that disagree.
    """
    name, size = _split(text)
    if devices is not None and size is not None and devices != size:
        raise UserError(f"cluster {shown(text)} has {size} devices, but {devices} are asked for")
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    if not name.endswith(".toml") and name not in cluster_names():
        raise UserError(f"cluster {shown(text)} is unknown{nearest(name, cluster_names())}")
    try:
        content = read_text(path, LARGEST_FILE)
    except OSError as error:
        raise UserError(f"cluster file {named(name)} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"cluster file {named(name)} is not UTF-8; give a TOML file") from None
    cluster = parse_cluster(content, file=named(path.name))
    wanted = devices if devices is not None else size
    return cluster if wanted is None else resized(cluster, wanted)


def _split(text: str) -> tuple[str, int | None]:
    """The name and the size in `text`: a100-40x16 is 16 devices of a100-40. None without size."""
    match = re.fullmatch(r"(.+)x(\d{1,9})", text)
    return (match[1], int(match[2])) if match else (text, None)


def parse_cluster(text: str, *, file: str) -> Cluster:
    """Parses the TOML `text` of a cluster file; `file` is its name in error messages.

    Raises UserError for anything wrong in it.
    """
    try:
        raw = parse_toml(text)
    except ValueError as error:
        raise UserError(f"{file} is not TOML: {error}") from None
    top = _table(raw, "", file)
    node = _table(top.pop("node"), "node", file)
    network = _network(top.pop("network", {"shape": "flat"}), file)
    between, nics = _between(top.pop("between", None), file)
    inside = _inside(top.pop("inside", None), file, between=between, network=network)
    cluster = Cluster(
        device=_device(top.pop("device"), file),
        devices_per_node=node["devices"],
        nodes=node.get("count", 1),
        inside=inside,
        between=between or inside,
        nics=nics,
        network=network,
        host=_host(top.pop("host"), file),
        efficiency=Efficiency(**_table(top.pop("efficiency", {}), "efficiency", file)),
        measured=_measured(top.pop("measured", {}), file),
        **top,
    )
    _check_whole(cluster, file, alone=between is None)
    return cluster


# -- tables --------------------------------------------------------------------


def _table(raw: Any, table: str, file: str) -> dict[str, Any]:
    """The values of one table, checked and in base units. Keys that are not in the file are not
    in the result.
    """
    keys, prefix = KEYS[table], f"{table}." if table else ""
    if not isinstance(raw, dict):
        raise UserError(f"{file}: {table} must be a table, [{table}]")
    for key in raw:
        if key not in keys:
            raise UserError(f"{file}: unknown key {prefix}{_word(key)}{nearest(key, keys)}")
    for key, kind in keys.items():
        if "!" in kind and key not in raw:
            raise UserError(f"{file}: {prefix}{key} is missing")
    return {key: _value(value, keys[key], f"{file}: {prefix}{key}") for key, value in raw.items()}


def _word(key: str) -> str:
    """A key of the user's file as error messages show it: quoted unless it is a plain word."""
    return key if re.fullmatch(r"[\w.-]{1,60}", key) else shown(key)


def _value(value: Any, kind: str, where: str) -> Any:
    """A value, checked, in base units; `kind` is an entry of KEYS, with its marks."""
    kind, _, marks = kind.partition(" ")
    if kind in UNITS:
        return parse_quantity(value, kind, where=where, positive="+" in marks)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    wanted, fits = {
        "text": (
            f"a text in quotes of at most {LONGEST_TEXT} characters, on one line",
            isinstance(value, str) and len(value) <= LONGEST_TEXT and value.isprintable(),
        ),
        "table": ("a table", isinstance(value, dict)),
        "list": (
            f"a list of at most {LONGEST_LIST}",
            isinstance(value, list) and len(value) <= LONGEST_LIST,
        ),
        "count": (
            f"a whole number of at least 1 and at most {WORLD:,}",
            type(value) is int and 1 <= value <= WORLD,
        ),
        "factor": (
            f"a number of at least 1 and at most {MOST_FACTOR:g}",
            number and 1 <= value <= MOST_FACTOR,
        ),
        "share": ("a number over 0 and up to 1", number and 0 < value <= 1),
    }[kind]
    if not fits:
        raise UserError(f"{where} is {shown(value)}; it must be {wanted}")
    return value


def _device(raw: Any, file: str) -> Device:
    device = _table(raw, "device", file)
    flops = Flops(**_table(device.pop("flops"), "device.flops", file))
    if flops == Flops():
        raise UserError(f"{file}: device.flops gives no rate; say at least one, such as bf16")
    if device.get("idle", 0.0) > device.get("watts", device.get("idle", 0.0)):
        raise UserError(f"{file}: device.idle is more than device.watts")
    if device.get("reserved", 0.0) >= device["memory"]:
        raise UserError(f"{file}: device.reserved leaves nothing of device.memory")
    return Device(flops=flops, **device)


def _host(raw: Any, file: str) -> Host:
    host = _table(raw, "host", file)
    return Host(link=_link(host, "host", file), **host)


def _measured(raw: Any, file: str) -> tuple[tuple[str, float], ...]:
    """The (dotted name, value) pairs of [measured], in the order of the file."""
    found: list[tuple[str, float]] = []

    def walk(tree: Any, path: str) -> None:
        if isinstance(tree, dict) and path.count(".") < 3:
            for key, value in tree.items():
                walk(value, f"{path}.{key}" if path else key)
        elif path in MEASURABLE:
            found.append((path, _value(tree, MEASURABLE[path], f"{file}: measured.{path}")))
        else:
            known = nearest(path, MEASURABLE)
            raise UserError(f"{file}: measured.{_word(path)} is unknown{known}")

    walk(raw, "")
    return tuple(found)


# -- links and networks --------------------------------------------------------


def _link(table: dict[str, Any], name: str, file: str) -> Link:
    """Builds the link of table `name` and removes its three keys from `table`. A link with a name
    in LINKS needs no numbers.
    """
    said = {key: table.pop(key, None) for key in LINK}
    if said["link"] is None:
        raise UserError(f"{file}: {name}.link is missing")
    known = LINKS.get(said["link"])
    for key in ("bandwidth", "latency"):
        if known is None and said[key] is None:
            raise UserError(
                f"{file}: {name}.{key} is missing, and link {shown(said['link'])} is none of those "
                f"with known numbers{nearest(said['link'], LINKS)}"
            )
    if known is None:
        return Link(said["link"], said["bandwidth"], said["latency"])
    if said["bandwidth"] is not None and not isclose(said["bandwidth"], known.bandwidth):
        raise UserError(
            f"{file}: {name}.bandwidth is {spell(said['bandwidth'], 'bytes/s')}, but "
            f"{known.name} has {spell(known.bandwidth, 'bytes/s')} in one direction; drop it, "
            "or give the link a name of its own"
        )
    return Link(known.name, known.bandwidth, said["latency"] or known.latency)


def _between(raw: Any, file: str) -> tuple[Link | None, int]:
    """The link of one network card and the number of cards; (None, 1) without [between]."""
    if raw is None:
        return None, 1
    table = _table(raw, "between", file)
    link, nics = _link(table, "between", file), table.get("nics", 1)
    total = table.get("node_bandwidth")
    if total is not None and not isclose(total, nics * link.bandwidth):
        raise UserError(
            f"{file}: between.node_bandwidth is {spell(total, 'bytes/s')}, but {nics} x "
            f"{link.name} are {spell(nics * link.bandwidth, 'bytes/s')}; drop it, or correct "
            "between.nics"
        )
    return link, nics


def _inside(raw: Any, file: str, *, between: Link | None, network: Network) -> Link:
    """The link between the devices of a node; in a Grid, the link between neighbours."""
    if isinstance(network, Grid):
        if raw is not None or between is None:
            raise UserError(
                f"{file}: in a torus or mesh all wires are alike: give [between], not [inside]"
            )
        return between
    if raw is None:
        raise UserError(f"{file}: [inside] is missing, the link between the devices of a node")
    return _link(_table(raw, "inside", file), "inside", file)


def _network(raw: Any, file: str) -> Network:
    table = _table(raw, "network", file)
    shape = table.pop("shape")
    if shape not in SHAPES:
        raise UserError(f"{file}: network.shape {shown(shape)} is unknown{nearest(shape, SHAPES)}")
    for key in table:
        if key not in SHAPES[shape]:
            raise UserError(f"{file}: network.{key} says nothing about a {shape} network")
    if shape in ("torus", "mesh"):
        wraps = 0 if shape == "mesh" else table.get("wraps", 1)
        slices = tuple(_dims(dims, "slices", file) for dims in table.get("slices", []))
        return Grid(_dims(table.get("dims"), "dims", file), wraps, slices)
    if shape == "spine-leaf":
        if set(table) != SHAPES[shape]:
            raise UserError(f"{file}: a spine-leaf network needs leaf and oversubscription")
        return Tree((Level(table["leaf"], table["oversubscription"]),))
    return Tree(_levels(table.get("levels", []), file) if shape == "fat-tree" else ())


def _dims(value: Any, key: str, file: str) -> tuple[int, ...]:
    whole = isinstance(value, list) and all(type(n) is int and 1 <= n <= GRID for n in value)
    if not whole or not 1 <= len(value) <= LONGEST_LIST or prod(value) > GRID:
        raise UserError(
            f"{file}: network.{key} must give whole numbers, such as [4, 4, 4], of at most "
            f"{GRID:,} devices together"
        )
    return tuple(value)


def _levels(value: list[Any], file: str) -> tuple[Level, ...]:
    wanted = "{ nodes = 16, oversubscription = 2 }"
    try:
        levels = tuple(Level(**level) for level in value)
        counts = all(type(at.nodes) is int and 1 <= at.nodes <= WORLD for at in levels)
        sound = counts and all(1 <= at.oversubscription <= MOST_FACTOR for at in levels)
    except TypeError:
        sound = False
    if not value or not sound:
        raise UserError(f"{file}: network.levels must be a list of {wanted}, the lowest first")
    for lower, upper in pairwise(levels):
        if upper.nodes % lower.nodes or upper.nodes == lower.nodes:
            raise UserError(
                f"{file}: network.levels: {upper.nodes} nodes are not several groups of "
                f"{lower.nodes}"
            )
    return levels


def _check_whole(cluster: Cluster, file: str, *, alone: bool) -> None:
    """Checks numbers of different tables against each other; `alone` means without [between]."""
    if cluster.devices > WORLD:
        raise UserError(
            f"{file}: {cluster.nodes:,} nodes of {cluster.devices_per_node:,} devices are "
            f"{cluster.devices:,}; at most {WORLD:,} are planned for"
        )
    if isinstance(cluster.network, Grid) and prod(cluster.network.dims) != cluster.devices:
        dims = " x ".join(map(str, cluster.network.dims))
        raise UserError(
            f"{file}: network.dims {dims} are {prod(cluster.network.dims)} devices, but "
            f"{cluster.nodes} nodes of {cluster.devices_per_node} are {cluster.devices}"
        )
    if alone and cluster.nodes > 1:
        raise UserError(f"{file}: [between] is missing, the link between the {cluster.nodes} nodes")
    for name, value in cluster.measured:
        if isinstance(cluster.network, Grid) and name.startswith("inside."):
            raise UserError(f"{file}: measured.{name}: in a torus or mesh measure between")
        if not name.startswith("device.flops."):
            continue
        rate = getattr(cluster.device.flops, name.removeprefix("device.flops."))
        if rate is None or value > rate:
            raise UserError(
                f"{file}: measured.{name} is {spell(value, 'FLOP/s')}, which {name} does not "
                "promise; give its dense rate"
            )
