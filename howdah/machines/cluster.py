"""Cluster: the machines that a run is planned for, as data: devices, memory, links, network.

    node 0                              node 1
    +-----------------------------+     +-----------------------------+
    | host: memory, disk          |     |                             |
    |   |  pcie                   |     |                             |
    | device == device == device  |     | device == device == device  |
    |   |  inside (nvlink)   |    |     |   |                    |    |
    | nic                   nic   |     | nic                   nic   |
    +--|---------------------|----+     +--|---------------------|----+
       +----- between (infiniband): a network, Tree or Grid -----+

A *node* is the set of devices that the fast link joins, even across several boxes: 8 on an HGX
board, 72 in an NVL72 rack. Ranks fill nodes in order: with 8 devices a node, rank r is on node
r // 8.

All numbers are nominal: those of the data sheet, for one direction and without sparsity. A cluster
also has measured numbers, and efficiencies (the fraction of a nominal number that is assumed where
nothing was measured); `attained` replaces the nominal numbers by these.
"""

from dataclasses import dataclass, fields, replace
from math import prod
from typing import Annotated, Any

from howdah.base.bounds import Bound, Length, Unit
from howdah.base.errors import UserError

WORLD = 1 << 20  # most ranks and devices of a plan; no machine has so many

# What a cluster file may say. The positive ones are divided by.
Name = Annotated[str, Length(0, 200)]
Count = Annotated[int, Bound(1, WORLD)]
Factor = Annotated[float, Bound(1, 1e6)]
Fraction = Annotated[float, Bound(0, 1, above=True)]
Memory = Annotated[float, Unit("bytes", positive=True)]
Bandwidth = Annotated[float, Unit("bytes/s", positive=True)]
FlopRate = Annotated[float, Unit("FLOP/s", positive=True)]
Bytes = Annotated[float, Unit("bytes")]
Watts = Annotated[float, Unit("watts")]


@dataclass(frozen=True)
class Link:
    """A link (wire): its name, bandwidth in bytes/s in one direction, latency in s per message, and
    seconds for which each message keeps a rank at its ends busy, where that was measured.
    """

    name: str
    bandwidth: float
    latency: float
    message: float = 0.0


# Eight V100 all-reduce at 23, 46, 88 and 136 GB/s where 2, 3, 4 and 8 of them do (traces of vTrain,
# github.com/VIA-Research/vTrain). AMD's, Intel's and Huawei's sheets give wires from each to each.
# Sixteen V100 are behind switches (DGX-2).
MOST_DIRECT = 8
DIRECT = ("nvlink1", "nvlink2", "infinity-fabric", "gaudi-ports", "hccs")


def _links() -> dict[str, Link]:
    # Bytes/s per direction and device. NVLink's data sheets add both directions (160, 300, 600,
    # 900, 1800, 3600 GB/s). PCIe: 16 lanes.
    nvlink = (80e9, 150e9, 300e9, 450e9, 900e9, 1800e9)
    pcie = {3: 15.75e9, 4: 31.5e9, 5: 63e9, 6: 121e9}
    # One port of InfiniBand, and Ethernet, in Gb/s.
    ports = {"edr": 100, "hdr": 200, "ndr": 400, "xdr": 800}
    ethernet = {"1gbe": 1, "10gbe": 10, "25gbe": 25, "100gbe": 100}
    # Latencies are those of NCCL's own cost model (src/graph/tuning.cc, hwLatencies, Ring with the
    # Simple protocol: NVLink 3.4, PCI 5.7, network 14.0 us). Ethernet means TCP through the
    # kernel: 50 us, a rough value.
    return {
        **{f"nvlink{n}": Link(f"nvlink{n}", rate, 3.4e-6) for n, rate in enumerate(nvlink, 1)},
        **{f"pcie{n}": Link(f"pcie{n}", rate, 5.7e-6) for n, rate in pcie.items()},
        **{name: Link(name, rate * 1e9 / 8, 14e-6) for name, rate in ports.items()},
        **{name: Link(name, rate * 1e9 / 8, 50e-6) for name, rate in ethernet.items()},
    }


LINKS = _links()  # a cluster file may name one of these instead of giving its numbers


@dataclass(frozen=True)
class Flops:
    """Dense FLOP/s by precision of the operands, accumulated in float32 or wider.

    None means that the device has no such arithmetic.
    """

    float64: FlopRate | None = None
    float32: FlopRate | None = None
    tf32: FlopRate | None = None
    fp16: FlopRate | None = None
    bf16: FlopRate | None = None
    fp8: FlopRate | None = None
    fp4: FlopRate | None = None


@dataclass(frozen=True)
class Device:
    """One accelerator, or one core that acts as one.

    name        of the product; one that begins with CPU is a processor's core
    memory      bytes
    bandwidth   of the memory, in bytes/s
    reserved    bytes of memory in use before the first tensor (driver, context)
    watts       power at full load (the board's limit); None when it is not published
    idle        power while the device waits, in watts
    price       to buy, in USD; None when it is not known
    cuda_names  what torch calls it, exactly; a run finds its rates by them
    """

    name: Name
    memory: Memory
    bandwidth: Bandwidth
    flops: Flops
    reserved: Bytes = 0.0
    watts: Watts | None = None
    idle: Watts = 0.0
    price: Annotated[float, Unit("USD", positive=True)] | None = None
    cuda_names: Annotated[tuple[Name, ...], Length(0, 100)] = ()

    @property
    def is_processor(self) -> bool:
        """Whether it is a processor's core."""
        return self.name.lower().startswith("cpu")


@dataclass(frozen=True)
class Host:
    """The host of a node: memory and disk for offload.

    memory            bytes per node
    memory_bandwidth  bytes/s per node, as an update of states reaches it: about half of the data
                      sheet's
    link              between one device and the host's memory, when all devices use it at once
    disk              bytes per node
    disk_bandwidth    bytes/s per node
    """

    memory: float
    link: Link
    disk: float = 0.0
    disk_bandwidth: float = 0.0
    memory_bandwidth: float = 100e9  # eight channels of DDR4-3200, rough


@dataclass(frozen=True)
class Level:
    """One level of switches. Each joins `nodes` nodes; 1/`oversubscription` of their bandwidth
    leads up to the next level.
    """

    nodes: Count
    oversubscription: Factor


@dataclass(frozen=True)
class Tree:
    """A network of switches; levels from the lowest up. Flat has no level, spine-leaf has one."""

    levels: tuple[Level, ...] = ()


@dataclass(frozen=True)
class Grid:
    """A torus or mesh: devices wired to their neighbours in each dim. Ranks are numbered with the
    last dim fastest.

    dims    number of devices along each dim
    wraps   a dim closes to a ring when its size is a multiple of this: 0 is a mesh, 1 a torus,
            and 4 or 16 a slice of a TPU pod
    slices  the `dims` of the other sizes in which the machine exists
    """

    dims: tuple[int, ...]
    wraps: int = 1
    slices: tuple[tuple[int, ...], ...] = ()

    def closed(self, dim: int) -> bool:
        return self.wraps > 0 and self.dims[dim] % self.wraps == 0


Network = Tree | Grid


@dataclass(frozen=True)
class Efficiency:
    """The fraction of each nominal number that a plan assumes where nothing was measured.

    matmul   of dense FLOP/s: A100, H100, B200 reach 271, 794, 1745 of 312, 989, 2250 TFLOP/s
    memory   of the device memory's bandwidth: a rule of thumb
    inside   of the bandwidth of a node's link: eight A100 all-reduce 1 GiB at 224 of 300 GB/s,
             eight V100 at 135 of 150 (traces of vTrain, github.com/VIA-Research/vTrain)
    between  of the bandwidth of a network card: TPU links reach 90 of 100 GB/s, but some published
             clusters reach a tenth of the nominal bandwidth; measure it
    """

    matmul: Fraction = 0.78
    memory: Fraction = 0.8
    inside: Fraction = 0.75
    between: Fraction = 0.8


@dataclass(frozen=True)
class Cluster:
    """Devices in nodes, the links inside and between nodes, and the costs.

    inside    the link between the devices of a node
    between   one network card of a node; in a Grid, the wire between neighbours, and `inside` is
              the same; for a single node without a network, the same as `inside`
    nics      network cards per node, shared by its devices (1 in a Grid, which has none)
    summary   one line of description
    rent      USD per device and hour; None when it is not known
    price_per_hour   USD per node and hour, also where a run uses a part of the node
    pue       power usage effectiveness: power of the whole site over that of the devices
    carbon    kg of CO2 per kWh
    measured  (dotted name of a field, value), such as ("device.flops.bf16", 271e12)
    profile   path of the profile that was measured on it; empty: none was
    slow      (node, bytes/s) of nodes whose cards are slower than `between`, as measured
    """

    name: str
    device: Device
    devices_per_node: int
    nodes: int
    inside: Link
    between: Link
    network: Network
    host: Host
    nics: int = 1
    summary: str = ""
    rent: float | None = None
    price_per_hour: float | None = None
    # pue, carbon: from the Llama model cards, arXiv 2302.13971 section 6.
    pue: float = 1.1
    carbon: float = 0.385
    efficiency: Efficiency = Efficiency()
    measured: tuple[tuple[str, float], ...] = ()
    profile: str = ""
    slow: tuple[tuple[int, float], ...] = ()

    def card(self, node: int) -> float:
        """Bytes/s of a network card of a node."""
        return dict(self.slow).get(node, self.between.bandwidth)

    @property
    def devices(self) -> int:
        return self.devices_per_node * self.nodes

    @property
    def rent_of_device(self) -> float | None:
        """USD per device and hour: its rent, or its share of what the node costs."""
        if self.rent is not None or self.price_per_hour is None:
            return self.rent
        return self.price_per_hour / self.devices_per_node

    @property
    def direct(self) -> bool:
        """Whether a device has a wire of its own to each other one of its node, without a switch:
        then some devices of a node have only the wires between themselves.
        """
        return self.inside.name in DIRECT and self.devices_per_node <= MOST_DIRECT

    @property
    def alone(self) -> bool:
        """Whether the cluster is one node without a network to other nodes."""
        return isinstance(self.network, Tree) and self.between == self.inside


def peak(device: Device, precision: str) -> float:
    """Dense FLOP/s at `precision`. Raises UserError when the device has no such arithmetic."""
    known = {field.name: getattr(device.flops, field.name) for field in fields(Flops)}
    rate: float | None = known.get(precision)
    if rate is None:
        offered = ", ".join(name for name, value in known.items() if value is not None)
        raise UserError(
            f"{device.name} has no {precision} arithmetic; it has {offered}: name one, such as "
            f"method.precision={offered.rpartition(' ')[2]}"
        )
    return rate


# -- what a plan counts on -----------------------------------------------------


def attained(cluster: Cluster) -> Cluster:
    """The same cluster with the numbers that a plan should assume, in place of the nominal ones.

    A number is the measured one if there is one, else nominal × efficiency. Latencies, sizes and
    prices that were not measured are unchanged. Applying the function twice changes nothing.
    """
    stated = {name: value for name, _, value in expected(cluster)}
    counted = cluster
    for name, value in {**stated, **dict(cluster.measured)}.items():
        counted = _with(counted, name.split("."), value)
    if isinstance(cluster.network, Grid):
        counted = replace(counted, inside=counted.between)  # the same wires
    elif cluster.alone:
        counted = replace(counted, between=counted.inside)
    return replace(counted, measured=(), efficiency=Efficiency(1.0, 1.0, 1.0, 1.0))


def usable_memory(cluster: Cluster) -> float:
    """Bytes of a device's memory that a run can use: without what a process holds before its first
    weight, and of the size that was measured, where that is less than the data sheet's.
    """
    device = attained(cluster).device
    return device.memory - device.reserved


def expected(cluster: Cluster) -> list[tuple[str, float, float]]:
    """(dotted name, efficiency, nominal × efficiency) of each number that efficiency lowers."""
    share = cluster.efficiency
    rates = [
        (f"device.flops.{field.name}", share.matmul)
        for field in fields(Flops)
        if getattr(cluster.device.flops, field.name) is not None
    ]
    inside = [] if isinstance(cluster.network, Grid) else [("inside.bandwidth", share.inside)]
    between = [] if cluster.alone else [("between.bandwidth", share.between)]
    shares = [*rates, ("device.bandwidth", share.memory), *inside, *between]
    return [(name, part, part * nominal(cluster, name)) for name, part in shares]


def nominal(cluster: Cluster, name: str) -> float:
    """The number of the cluster at a dotted name, such as inside.bandwidth."""
    value: Any = cluster
    for part in name.split("."):
        value = getattr(value, part)
    return float(value)


def _with(tree: Any, path: list[str], value: float) -> Any:
    head, *rest = path
    return replace(tree, **{head: _with(getattr(tree, head), rest, value) if rest else value})


# -- sizes ---------------------------------------------------------------------


def resized(cluster: Cluster, devices: int, *, called: str = "") -> Cluster:
    """The same kind of machine with another number of devices.

    called  how its user names it, such as ours.toml

    `devices` must be a multiple of a node's devices, or fewer than one node has; for a Grid, the
    size of one of its slices. Raises UserError, with the nearest possible sizes, for any other.
    """
    per_node, called = cluster.devices_per_node, called or cluster.name
    if devices > WORLD:
        raise UserError(
            f"cluster {cluster.name} with {devices:,} devices is too large; at most {WORLD:,} are "
            "planned for"
        )
    if isinstance(cluster.network, Grid):
        grid = cluster.network
        sizes = {prod(dims): dims for dims in (*grid.slices, grid.dims)}
        if devices not in sizes:
            raise UserError(_no_size(cluster, called, devices, sorted(sizes)))
        network = replace(grid, dims=sizes[devices])
        nodes = max(1, devices // per_node)
        part = min(devices, per_node)
        return replace(cluster, network=network, nodes=nodes, devices_per_node=part)
    if 0 < devices < per_node:
        nics = max(1, cluster.nics * devices // per_node)
        return replace(cluster, nodes=1, devices_per_node=devices, nics=nics)
    if cluster.alone and devices != per_node:
        raise UserError(_no_size(cluster, called, devices, [per_node]))
    if devices < 1 or devices % per_node:
        below = devices // per_node * per_node
        raise UserError(
            _no_size(cluster, called, devices, [n for n in (below, below + per_node) if n > 0])
        )
    return replace(cluster, nodes=devices // per_node)


def _no_size(cluster: Cluster, called: str, devices: int, sizes: list[int]) -> str:
    below = [size for size in sizes if size < devices][-1:]
    above = [size for size in sizes if size > devices][:1]
    near = " or ".join(f"{called}x{size}" for size in (*below, *above))
    held = f"has {cluster.devices_per_node} devices in a node"
    if isinstance(cluster.network, Grid):
        held = "comes in slices of fixed sizes"
    elif cluster.alone:
        held = f"is one node of {cluster.devices_per_node} devices"
    return f"cluster {cluster.name} {held}, so not {devices}; use {near}"
