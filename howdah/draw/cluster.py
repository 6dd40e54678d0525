"""Clusters as text: a list of those included in howdah, and the full table of one.

The table has two columns of numbers: the value in the data sheet, and the value that a plan counts
on, with the reason why the two differ.
"""

from dataclasses import fields

from howdah.base.quantities import spell
from howdah.draw.columns import columns
from howdah.machines.cluster import Cluster, Grid, attained, expected, nominal
from howdah.machines.cluster_file import cluster_names, load_cluster
from howdah.machines.network import bisection

_LINK = (("bandwidth", "bytes/s"), ("latency", "seconds"))


def list_clusters() -> list[str]:
    """A line for each included cluster: its name, default number of devices, and summary."""
    clusters = {name: load_cluster(name) for name in cluster_names()}
    rows = [(name, str(found.devices), found.summary) for name, found in clusters.items()]
    return columns(rows, "<><")


def show_cluster(cluster: Cluster) -> list[str]:
    """The description of a cluster, with the values that a plan counts on, as lines."""
    device, host, rent = cluster.device, cluster.host, cluster.rent_of_device
    return [
        cluster.name + (f": {cluster.summary}" if cluster.summary else ""),
        f"{cluster.devices} devices: {cluster.nodes} x {cluster.devices_per_node} {device.name}",
        f"network: {_network(cluster)}; {spell(bisection(cluster), 'bytes/s')} between its halves",
        "",
        *_numbers(cluster),
        "",
        f"host: {spell(host.memory, 'bytes')} of memory at "
        f"{spell(host.memory_bandwidth, 'bytes/s')}, {spell(host.disk, 'bytes')} of disk",
        f"reserved on a device: {spell(device.reserved, 'bytes')}",
        f"power: {_or_none(device.watts, 'watts')}, idle {spell(device.idle, 'watts')}; "
        f"PUE {cluster.pue:g}, {spell(cluster.carbon, 'kg/kWh')}",
        f"price: {_or_none(device.price, 'USD')}; rent: {_or_none(rent, 'USD/h')}",
    ]


def check_cluster(cluster: Cluster) -> list[str]:
    """A verdict on a cluster that could be read, then a line for each optional value it lacks."""
    device, rent = cluster.device, cluster.rent_of_device
    optional = [
        ("device.reserved", device.reserved, "plans take all of a device's memory as free"),
        ("device.watts", device.watts, "energy and carbon stay unknown"),
        ("device.price or rent", device.price or rent, "the cost of a run stays unknown"),
        ("measured", cluster.measured, "plans count on assumed shares of the nominal numbers"),
    ]
    size = f"{cluster.nodes} x {cluster.devices_per_node} {device.name}"
    missing = [f"  {key} is not given: {then}" for key, stated, then in optional if not stated]
    return [f"{cluster.name}: sound, {size}", *missing]


def _numbers(cluster: Cluster) -> list[str]:
    """The table of numbers as lines."""
    counted = attained(cluster)
    shares = {name: share for name, share, _ in expected(cluster)}
    measured = dict(cluster.measured)
    rows = [("", "nominal", "counted on", "")]
    for name, kind in _rows(cluster):
        why = "measured" if name in measured else ""
        if not why and name in shares:
            why = f"assumed: {shares[name]:g} of nominal"
        values = (spell(nominal(cluster, name), kind), spell(nominal(counted, name), kind))
        rows.append((_label(cluster, name), *values, why))
    return columns(rows, "<>><")


def _rows(cluster: Cluster) -> list[tuple[str, str]]:
    """(dotted name, kind of unit) of every number of the table."""
    flops = cluster.device.flops
    rates = [rate.name for rate in fields(flops) if getattr(flops, rate.name) is not None]
    between = [] if cluster.alone else ["between"]
    inside = [] if isinstance(cluster.network, Grid) else ["inside"]
    links = (*inside, *between, "host.link")
    disk = [("host.disk_bandwidth", "bytes/s")] if cluster.host.disk_bandwidth else []
    return [
        ("device.memory", "bytes"),
        ("device.bandwidth", "bytes/s"),
        *((f"device.flops.{name}", "FLOP/s") for name in rates),
        *((f"{link}.{key}", kind) for link in links for key, kind in _LINK),
        *disk,
    ]


def _label(cluster: Cluster, name: str) -> str:
    names = {"inside": cluster.inside, "between": cluster.between, "host.link": cluster.host.link}
    table, _, key = name.rpartition(".")
    if table not in names or key != "bandwidth":
        return name
    cards = f"{cluster.nics} x " if table == "between" and cluster.nics > 1 else ""
    return f"{name} ({cards}{names[table].name})"


def _network(cluster: Cluster) -> str:
    network = cluster.network
    if isinstance(network, Grid):
        closed = [str(n) for dim, n in enumerate(network.dims) if network.closed(dim)]
        rings = f", wrapping around in the dims of {', '.join(closed)}" if closed else ""
        return f"grid of {' x '.join(map(str, network.dims))}{rings}"
    if not network.levels:
        return "flat"
    levels = (f"{level.nodes} nodes {level.oversubscription:g}:1" for level in network.levels)
    return f"switches over {', then '.join(levels)}"


def _or_none(value: float | None, kind: str) -> str:
    return "not stated" if value is None else spell(value, kind)
