"""The files that `howdah measure` writes: a cluster, and the profile that it names.

Both are TOML that a person can read and change; every value stands with its source. The cluster's
own numbers are the best windows, the `measured` ones the medians, on which plans count.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from howdah.base.atomic import write_text
from howdah.base.errors import UserError, named
from howdah.machines.cluster_file import HERE, measured_file
from howdah.sim.measured import Facts
from howdah.sim.profile import Kernel, Profile

VALUES = {  # the values of a profile that are measured, and on what
    "products": "linear layers",
    "pairs": "attention",
    "forward": "blocks",
    "backward": "blocks",
    "stream": "blocks",
    "activation": "blocks",
    "heads": "blocks",
    "again": "blocks",
    "end_forward": "embeddings and heads",
    "end_backward": "embeddings and heads",
    "logits": "heads",
    "loss": "heads",
    "norm": "heads",
    "table": "embeddings",
    "action": "steps",
    "step": "steps",
    "update": "steps",
    "meet": "steps of models that ranks share",
    "uneven": "steps of models that ranks share",
}


@dataclass(frozen=True)
class Rate:
    """A rate or a latency: of the best window, and the median of windows, with their spread."""

    best: float
    median: float
    spread: float


@dataclass(frozen=True)
class Wire:
    """A transport between ranks: bytes per second and seconds of latency."""

    name: str
    bandwidth: Rate
    latency: Rate


@dataclass(frozen=True)
class Machine:
    """What was found of a machine with one number of ranks.

    cores        for the ranks of a node
    memory       bytes of a node
    nodes        machines of the world
    flops        by precision
    wires        by transport, of which the first is the one that runs take; of several machines
                 also the `local` one
    disk         bytes, and bytes per second of the slower of writing and reading
    """

    facts: Facts
    cores: int
    memory: int
    nodes: int
    flops: Mapping[str, Rate]
    bandwidth: Rate
    wires: Mapping[str, Wire]
    disk: tuple[int, Rate]

    @property
    def links(self) -> dict[str, Wire]:
        """The links of the cluster: inside a node, and between nodes. One rank has none; its link
        costs nothing.
        """
        nothing = Wire("none", Rate(1e12, 1e12, 0.0), Rate(1e-9, 1e-9, 0.0))
        first = next(iter(self.wires.values()), nothing)
        if self.nodes == 1:
            return {"inside": first}
        return {"inside": self.wires.get("local", first), "between": first}


def cluster_text(found: Machine) -> str:
    """The cluster file."""
    facts, local = found.facts, found.facts.ranks // found.nodes
    threads = f"{facts.threads} thread{'s' * (facts.threads > 1)}"
    ranks = f"{facts.ranks} rank{'s' * (facts.ranks > 1)}"
    size, disk = found.disk
    named_rates = {f"device.flops.{name}": rate for name, rate in found.flops.items()}
    rates = {**named_rates, "device.bandwidth": found.bandwidth}
    lines = [
        f"# Written by howdah measure on {facts.date}: {ranks} at once, each with {threads}.",
        f'name = "{HERE}"',
        f"summary = {_text(f'{facts.cpu}, {found.cores} cores: {ranks} of {threads}')}",
        f'profile = "{profile_file(measured_file(Path(), facts.ranks)).name}"',
        *("", "[device]", f"name = {_text(f'{facts.cpu}, {threads}')}"),
        f'memory = "{found.memory // local} B"',
        f'bandwidth = "{found.bandwidth.best / 1e9:.6g} GB/s"',
        'reserved = "220 MiB" # a rank before its first weight',
        *("", "[device.flops]"),
        *(f'{name} = "{rate.best / 1e9:.6g} GFLOP/s"' for name, rate in found.flops.items()),
        *("", "[node]", f"devices = {local}", f"count = {found.nodes}"),
    ]
    for link, wire in found.links.items():
        rates[f"{link}.bandwidth"], rates[f"{link}.latency"] = wire.bandwidth, wire.latency
        lines += ["", f"[{link}]", f'link = "{wire.name}"']
        lines.append(f'bandwidth = "{wire.bandwidth.best / 1e9:.6g} GB/s"')
        lines.append(f'latency = "{wire.latency.best * 1e6:.6g} us"')
    for wire in found.wires.values():
        spelled = f"{wire.bandwidth.median / 1e9:.3g} GB/s, {wire.latency.median * 1e6:.3g} us"
        lines.append(f"# transport {wire.name}: {spelled}")
    rates["host.disk_bandwidth"] = disk
    lines += [
        *("", "[host] # its memory is that of the ranks: offload is a copy"),
        *(f'memory = "{found.memory} B"', 'link = "shared"'),
        f'bandwidth = "{found.bandwidth.median / 2e9:.6g} GB/s"',
        *('latency = "1 us"', f'disk = "{size} B"'),
        f'disk_bandwidth = "{disk.best / 1e9:.6g} GB/s"',
        *("", "[measured] # medians of rounds; above, the best"),
        *(_measured(name, rate) for name, rate in rates.items()),
    ]
    return "\n".join([*lines, ""])


def _measured(name: str, rate: Rate) -> str:
    unit, size = ("GFLOP/s", 1e9) if "flops" in name else ("GB/s", 1e9)
    if name.endswith("latency"):
        unit, size = "us", 1e-6
    return f'{name} = "{rate.median / size:.6g} {unit}" # rounds differ by {rate.spread:.0%}'


def _text(word: str) -> str:
    """A text of TOML, whatever the processor is called."""
    return json.dumps(word, ensure_ascii=False)


def profile_text(facts: Facts, profiles: Mapping[str, Profile]) -> str:
    """The profile file."""
    words = {name: word for name, word in vars(facts).items() if isinstance(word, str)}
    head = [f"{name} = {_text(word)}" for name, word in words.items()]
    numbers = [f"ranks = {facts.ranks}", f"threads = {facts.threads}"]
    lines = [f"# Written by howdah measure on {facts.date}.", *head, *numbers]
    for precision, profile in profiles.items():
        lines += ["", f"[{precision}]"]
        for name, of in VALUES.items():
            source = f"measured on {facts.date}: {of}"
            lines.append(_row(name, getattr(profile, name), source))
        source = "howdah's code: tokens of a chunk of the head, sums of scalars in a step"
        lines += [_row("chunk", profile.chunk, source), _row("waits", profile.waits, source)]
        lines.append(_row("crowd", profile.crowd, f"{facts.ranks} ranks on the cores of a machine"))
    return "\n".join([*lines, ""])


def _row(name: str, value: float | Sequence[Kernel], source: str) -> str:
    if isinstance(value, tuple):
        kernels = ", ".join(
            "{" + ", ".join(f"{key} = {size:.5g}" for key, size in vars(one).items()) + "}"
            for one in value
        )
        return f'{name} = {{value = [{kernels}], source = "{source}"}}'
    return f'{name} = {{value = {value:.5g}, source = "{source}"}}'


def profile_file(cluster: Path) -> Path:
    """The profile beside a cluster file."""
    return cluster.with_suffix(".profile.toml")


def write_files(folder: Path, ranks: int, texts: tuple[str, str], *, usual: bool) -> None:
    """Writes the cluster and the profile of so many ranks. Raises UserError.

    usual  whether it is also what the name without a number means
    """
    path = measured_file(folder, ranks)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_text(profile_file(path), texts[1])
        write_text(path, texts[0])
        if usual:
            write_text(folder / f"{HERE}.toml", texts[0])
    except OSError as error:
        raise UserError(
            f"{named(path)} cannot be written: {error.strerror}; give --out another folder"
        ) from None
