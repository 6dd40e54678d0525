"""A new cluster file from a few answers: `howdah cluster new`.

A device that ships with howdah brings its own numbers, and those of its host, from its file:

    device RTX 4090    [device], [efficiency], measured rates, [host]    of clusters/rtx-4090.toml
    another device     memory, bandwidth of its memory, dense rates      as they are answered

A link is one of the known ones (`pcie4`), or a bandwidth (`25 Gb/s`) of a link with another name.
"""

import re
from dataclasses import dataclass
from typing import Any

import tomli_w

from howdah.base.errors import UserError, nearest, shown
from howdah.base.files import parse_toml, read_text
from howdah.base.quantities import with_unit
from howdah.machines.cluster import LINKS
from howdah.machines.cluster_file import FOLDER, LARGEST_FILE, cluster_names
from howdah.machines.cluster_tables import parse_cluster

LATENCY = "20 us"  # of a link that is none of the known ones, rough


@dataclass(frozen=True)
class Answers:
    """What a new file is made of; empty texts and None are left open.

    device   the name of a shipped device or cluster, or of another device
    devices  in a node
    nodes    in the cluster
    inside, between   links in a node and between nodes; nics: cards of a node
    host_memory       of a node
    price_per_hour    of a node
    memory, bandwidth, bf16, float32   of a device that does not ship, as texts with units
    """

    name: str
    device: str
    devices: int = 1
    nodes: int = 1
    inside: str = ""
    between: str = ""
    nics: int = 1
    host_memory: str = ""
    price_per_hour: str = ""
    memory: str = ""
    bandwidth: str = ""
    bf16: str = ""
    float32: str = ""


def known_devices() -> dict[str, str]:
    """The shipped devices by name, each with the first cluster that has it."""
    found: dict[str, str] = {}
    for name in cluster_names():
        found.setdefault(_table(name)["device"]["name"], name)
    return found


def cluster_like(device: str) -> str:
    """The shipped cluster whose device, or whose own name, is `device`; empty if there is none."""
    names = {_plain(name): name for name in cluster_names()}
    devices = {_plain(one): cluster for one, cluster in known_devices().items()}
    return names.get(_plain(device)) or devices.get(_plain(device), "")


def device_named(said: str) -> str:
    """The device, unless it does not ship and its name is the beginning of some that do: then a
    UserError with those.
    """
    begun = [one for one in known_devices() if _plain(one).startswith(_plain(said))]
    if cluster_like(said) or not begun:
        return said
    raise UserError(
        f"device {shown(said)} does not ship; did you mean {' or '.join(map(shown, begun))}? Of "
        "another device give --memory, --bandwidth and --bf16 or --float32"
    )


def usual(device: str) -> dict[str, str]:
    """What is answered for a shipped device if nothing else is said: its links and host."""
    if not (cluster := cluster_like(device)):
        return {"inside": "pcie4", "between": "10gbe", "host_memory": "64 GB"}
    table = _table(cluster)
    inside = table.get("inside", table.get("between", {}))
    between = table.get("between", {"link": "10gbe"})
    links = {"inside": inside["link"], "between": between["link"]}
    return {**links, "host_memory": table["host"]["memory"]}


def usual_nics(device: str, devices: int, between: str) -> int:
    """Network cards of a node with so many of a shipped device: as many to a device as the shipped
    node has, where the link is its own; else one.
    """
    if not (cluster := cluster_like(device)):
        return 1
    table = _table(cluster)
    wire, node = table.get("between", {}), table.get("node", {}).get("devices", 1)
    same = between in ("", wire.get("link"))
    return max(wire.get("nics", 1) * devices // node, 1) if same else 1


def cluster_text(answers: Answers) -> str:
    """The text of a cluster file. Raises UserError for answers that make no sound file."""
    cluster = cluster_like(answers.device)
    like = _table(cluster) if cluster else {}
    table: dict[str, Any] = {"name": answers.name}
    if answers.price_per_hour:
        table["price_per_hour"] = with_unit(answers.price_per_hour, "USD/h")
    table["device"] = like["device"] if like else _other(answers)
    table["node"] = {"devices": answers.devices, "count": answers.nodes}
    wires = like.get("inside", like.get("between")), like.get("between")
    table["inside"] = _link(answers.inside, wires[0], "--inside")
    if answers.nodes > 1:
        table["between"] = _link(answers.between, wires[1], "--between")
        table["between"] |= {"nics": answers.nics}
    host = like.get("host", {"memory": "64 GB", "link": "pcie4"})
    table["host"] = {**host, "memory": with_unit(answers.host_memory, "GB") or host["memory"]}
    if "efficiency" in like:
        table["efficiency"] = like["efficiency"]
    if rates := like.get("measured", {}).get("device"):
        table["measured"] = {"device": rates}
    told = f"# The device is that of {cluster}, where its sources stand.\n" if cluster else ""
    text = f"{told}{tomli_w.dumps(table)}"
    parse_cluster(text, file=answers.name)
    return text


def _other(answers: Answers) -> dict[str, Any]:
    """The table of a device that does not ship."""
    needed = {"memory": answers.memory, "bandwidth": answers.bandwidth}
    if missing := [f"--{name}" for name, value in needed.items() if not value]:
        near = nearest(answers.device, known_devices())
        raise UserError(
            f"device {shown(answers.device)} does not ship{near}; of another device give "
            f"{', '.join([*missing, '--bf16 or --float32'])}"
        )
    rates = {"float32": answers.float32, "bf16": answers.bf16}
    flops = {name: with_unit(rate, "TFLOP/s") for name, rate in rates.items() if rate}
    return {
        "name": answers.device,
        "memory": with_unit(answers.memory, "GB"),
        "bandwidth": with_unit(answers.bandwidth, "GB/s"),
        "flops": flops,
    }


def _link(said: str, like: dict[str, Any] | None, option: str) -> dict[str, Any]:
    """The table of a link: as it is said, or that of a shipped cluster, which may have one that is
    none of the known ones.
    """
    if like and said in ("", like["link"]):
        return {key: like[key] for key in ("link", "bandwidth", "latency") if key in like}
    if said in LINKS:
        return {"link": said}
    if re.match(r"\d", said):
        return {"link": option.removeprefix("--"), "bandwidth": said, "latency": LATENCY}
    raise UserError(
        f"{option} must be a known link, such as pcie4, or a bandwidth, such as '25 Gb/s', and is "
        f"{shown(said)}{nearest(said, LINKS)}"
    )


def _table(cluster: str) -> dict[str, Any]:
    return parse_toml(read_text(FOLDER / f"{cluster}.toml", LARGEST_FILE))


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
