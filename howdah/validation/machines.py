"""The machine of a published run: its device, how many in a node, and the links it names."""

import re
import tomllib
from dataclasses import fields, replace
from functools import cache
from math import ceil
from pathlib import Path
from typing import Any

from howdah.machines.cluster import LINKS, Cluster, Device, Flops, Grid, Link, resized
from howdah.machines.cluster_file import load_cluster
from howdah.validation.rows import Row

DEVICES = Path(__file__).with_name("devices.toml")
PORTS = {"fdr": 56e9, "edr": 100e9, "hdr": 200e9, "ndr": 400e9, "xdr": 800e9}
_TIMES = re.compile(r"(\d+)\s*(?:x|×|\*)\D{0,20}?(\d+(?:\.\d+)?)\s*([GT])\s*(b|B)")
_RATE = re.compile(r"(\d[\d,]*(?:\.\d+)?)(?:\s*(?:-|to|–)\s*(\d+(?:\.\d+)?))?\s*([GT])\s*(b|B)")


def cluster_of(row: Row, devices: int) -> Cluster | str:
    """The machine of a row with room for `devices`, or in a few words why it is not known."""
    name = re.sub(r"[\s_]+|NVIDIA|TESLA|AMD|INSTINCT", "", row["gpu"].upper())
    entry = next((one for one in _devices() if re.search(one["names"], name)), None)
    entry = entry or _by_peak(row["gpu"])
    if entry is None:
        return (
            f"device {row['gpu']} is not known; write its dense peak behind its name, as in "
            f"'{row['gpu']} 400 TFLOP/s'"
            if row["gpu"]
            else "device not published"
        )
    base = _varied(load_cluster(entry["cluster"]), entry)
    if stated := re.search(r"\b(\d{2,4})\s?W\b", row["gpu"]):
        base = replace(base, device=replace(base.device, watts=float(stated[1])))
    if isinstance(base.network, Grid):
        sizes = [dims for dims in base.network.slices if _count(dims) >= devices]
        if sizes:
            return resized(base, min(map(_count, sizes)))
        largest = max(base.network.slices, key=_count)  # several pods, as if they were one
        longer = *largest[:-1], largest[-1] * ceil(devices / _count(largest))
        grid = replace(base.network, slices=(*base.network.slices, longer))
        return resized(replace(base, network=grid), _count(longer))
    return _between(_inside(_placed(base, row, devices), row, entry), row)


def _count(dims: tuple[int, ...]) -> int:
    count = 1
    for size in dims:
        count *= size
    return count


@cache
def _devices() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = tomllib.loads(DEVICES.read_text(encoding="utf-8"))["device"]
    return found


def _by_peak(name: str) -> dict[str, Any] | None:
    """A device of which only the peak is known, as its name says it: the rest is as of an A100."""
    found = re.search(r"(\d+(?:\.\d+)?)\s*(T|P)FLOP", name, re.I)
    if not found:
        return None
    rate = float(found[1]) * {"T": 1e12, "P": 1e15}[found[2].upper()]
    flops = {"float32": rate / 8, "fp16": rate, "bf16": rate}
    return {"cluster": "a100-80", "name": name, "flops": flops} if rate else None


def _varied(base: Cluster, entry: dict[str, Any]) -> Cluster:
    """The shipped cluster with what is different; what was measured of a changed part goes."""
    device, measured = base.device, base.measured
    known = {field.name for field in fields(Device)} & entry.keys() - {"names"}
    changes = {name: entry[name] for name in known}
    if "flops" in entry:
        changes["flops"] = Flops(**{name: float(rate) for name, rate in entry["flops"].items()})
    for part in ("flops", "bandwidth"):
        if part in changes:
            measured = tuple(one for one in measured if not one[0].startswith(f"device.{part}"))
    if changes:
        changes["cuda_names"] = ()
    return replace(base, device=replace(device, **changes), measured=measured)


# -- nodes ---------------------------------------------------------------------


def _placed(base: Cluster, row: Row, devices: int) -> Cluster:
    """Nodes of the stated size; of a rack that one NVLink joins, the whole rack is a node."""
    stated = row.whole("gpus_per_node")
    per_node, joined = stated or base.devices_per_node, re.search(r"NVL(\d+)", row["intra_link"])
    rack = int(joined[1]) if joined else 0
    if not rack and base.devices_per_node > 16:
        rack = base.devices_per_node  # GB200 and GB300 are sold by the rack
    if rack > 8:
        per_node = next(size for size in range(min(rack, devices), 0, -1) if devices % size == 0)
        if per_node < 32 < devices:
            per_node = rack
    per_node = min(per_node, devices)
    nics = max(1, round(base.nics * per_node / base.devices_per_node))
    nodes = ceil(devices / per_node)
    return replace(base, devices_per_node=per_node, nodes=nodes, nics=nics)


def _inside(cluster: Cluster, row: Row, entry: dict[str, Any]) -> Cluster:
    """The link of a node: the row's, else the device's."""
    words, link = row["intra_link"].lower().replace(" ", ""), cluster.inside
    if "link" in entry:
        known = LINKS.get(entry["link"], link)
        link = replace(known, name=entry["link"])
        link = replace(link, bandwidth=entry.get("link_bandwidth", known.bandwidth))
    named = re.search(r"(nvlink|pcie)(?:gen)?([1-6])", words)
    if named and named[1] + named[2] in LINKS and "link_bandwidth" not in entry:
        link = LINKS[named[1] + named[2]]
    elif "pcie" in words and "pcie" not in link.name:
        link = LINKS["pcie4"]
    rate = _RATE.search(row["intra_link"])
    if rate and "nvl" not in words and "nvlink" not in words and "fabric" not in words:
        link = replace(link, bandwidth=_bytes(rate[1], rate[3], rate[4]) / _ways(words))
    elif rate and "nvlink" in words and "link_bandwidth" not in entry:
        stated = _bytes(rate[1], rate[3], rate[4])
        stated /= 2 if _ways(words) == 2 or stated > 1.01 * link.bandwidth else 1
        if 0.3 < stated / link.bandwidth < 1.01:
            link = replace(link, bandwidth=stated)
    if link == cluster.inside:
        return cluster
    kept = tuple(one for one in cluster.measured if not one[0].startswith("inside"))
    between = link if cluster.alone else cluster.between
    return replace(cluster, inside=link, between=between, measured=kept)


def _ways(words: str) -> int:
    return 2 if "bidir" in words or "both" in words else 1


def _bytes(number: str, prefix: str, unit: str) -> float:
    """Bytes/s of 400 Gb/s, of 1.8 TB/s."""
    scale = {"G": 1e9, "T": 1e12}[prefix] / (8 if unit == "b" else 1)
    return max(float(number.replace(",", "")) * scale, 1.0)  # 0 is no rate, and is divided by


# -- between nodes -------------------------------------------------------------


def _between(cluster: Cluster, row: Row) -> Cluster:
    """The network cards of a node as the row states them; else those of the shipped cluster."""
    text = row["inter_link"]
    words, per_node = text.lower(), cluster.devices_per_node
    if not text or "unstated" in words or cluster.nodes == 1:
        return cluster
    nics, rate = cluster.nics, 0.0
    if times := _TIMES.search(text):
        nics, rate = max(int(times[1]), 1), _bytes(*times.groups()[1:])
    elif found := _RATE.search(text):
        low, high = found[1], found[2] or found[1]
        rate = (_bytes(low, *found.groups()[2:]) * _bytes(high, *found.groups()[2:])) ** 0.5
        each = re.search(r"per\s*(gpu|device|chip|accelerator)|/\s*gpu", words)
        if each:
            nics = per_node
        elif "per node" in words or "/node" in words or rate >= 100e9:
            rate /= nics
        elif "measured" in words:
            nics = 1
    else:
        port = next((speed for name, speed in PORTS.items() if re.search(rf"\b{name}\b", words)), 0)
        rate = port / 8
    if not rate:
        return cluster
    slow = re.search(r"ethernet|gbe\b|tcp", words) and "roce" not in words
    name = re.sub(r"[^a-z0-9]+", "-", words)[:24].strip("-") or "network"
    link = Link(name, rate, 50e-6 if slow else 14e-6)
    kept = tuple(one for one in cluster.measured if not one[0].startswith("between"))
    if "measured" in words:
        kept += (("between.bandwidth", rate),)
    return replace(cluster, between=link, nics=min(nics, per_node), measured=kept)
