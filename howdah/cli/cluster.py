"""`howdah cluster`: lists, shows and checks clusters, and writes a file of a new one."""

from pathlib import Path
from typing import Annotated

import typer

from howdah.base.atomic import write_text
from howdah.base.errors import UserError, named
from howdah.cli.asking import answer, ask, number
from howdah.cli.environment import cluster_named
from howdah.draw.cluster import check_cluster, list_clusters, show_cluster
from howdah.draw.pictures import require_place
from howdah.machines.new_cluster import (
    Answers,
    cluster_like,
    cluster_text,
    device_named,
    known_devices,
    usual,
    usual_nics,
)

cluster_app = typer.Typer(
    no_args_is_help=True, help="List, show and check clusters; write a file of a new one."
)

Name = Annotated[str, typer.Argument(help="NAME, NAMExDEVICES or a .toml file")]
Text = Annotated[str, typer.Option()]


@cluster_app.command("list")
def _list() -> None:
    """Name the clusters that come with howdah."""
    print("\n".join(list_clusters()))


@cluster_app.command("show")
def _show(name: Name) -> None:
    """Print everything a cluster says, with what a plan counts on beside it."""
    print("\n".join(show_cluster(cluster_named(name))))


@cluster_app.command("check")
def _check(name: Name) -> None:
    """Say whether a cluster file is sound, and what it leaves open."""
    print("\n".join(check_cluster(cluster_named(name))))


@cluster_app.command("new")
def _new(  # noqa: PLR0913, PLR0917  each is an option of the command
    file: Annotated[Path, typer.Argument(help="the file to write, such as ours.toml")],
    device: Annotated[str, typer.Option(help="such as 'RTX 4090'; any other has a name")] = "",
    devices: Annotated[int | None, typer.Option(help="in a node")] = None,
    nodes: Annotated[int | None, typer.Option(help="in the cluster")] = None,
    inside: Annotated[str, typer.Option(help="link in a node: pcie4, nvlink4, '25 GB/s'")] = "",
    between: Annotated[str, typer.Option(help="link between nodes: 10gbe, ndr, '25 Gb/s'")] = "",
    nics: Annotated[int | None, typer.Option(help="network cards of a node")] = None,
    host_memory: Annotated[str, typer.Option(help="of a node, such as '128 GB'")] = "",
    price_per_hour: Annotated[str, typer.Option(help="USD for an hour of a node")] = "",
    memory: Annotated[str, typer.Option(help="of another device, such as '24 GB'")] = "",
    bandwidth: Annotated[str, typer.Option(help="of its memory, such as '900 GB/s'")] = "",
    bf16: Annotated[str, typer.Option(help="its dense rate, such as '120 TFLOP/s'")] = "",
    float32: Annotated[str, typer.Option(help="its dense rate, such as '30 TFLOP/s'")] = "",
    force: Annotated[bool, typer.Option(help="write over a file that is there")] = False,
) -> None:
    """Write a cluster file. What no option says is asked on a terminal."""
    if file.suffix != ".toml":
        raise UserError(f"{named(file)} is no name of a cluster file; it must end in .toml")
    require_place(file)
    if file.exists() and not force:
        raise UserError(f"{named(file)} is there already; give another name, or --force")
    read = str if memory or bandwidth else device_named
    device = answer("device", device, "which devices? " + ", ".join(known_devices()), "", read)
    like = usual(device)
    if not cluster_like(device):
        memory = memory or ask("memory", "memory of a device", "")
        bandwidth = bandwidth or ask("bandwidth", "bandwidth of its memory", "")
        bf16 = bf16 or float32 or ask("bf16", "dense TFLOP/s in bf16", "")
    devices = _number("devices", devices, "how many in a node?", "")
    if devices > 1:
        inside = inside or ask("inside", "link between them", like["inside"])
    nodes = _number("nodes", nodes, "how many nodes?", "1")
    if nodes > 1:
        between = between or ask("between", "link between nodes", like["between"])
        cards = usual_nics(device, devices, between)
        nics = _number("nics", nics, "network cards of a node", str(cards))
    host_memory = host_memory or ask("host-memory", "memory of a node", like["host_memory"])
    text = cluster_text(
        Answers(
            *(file.stem, device, devices, nodes, inside or like["inside"], between),
            1 if nics is None else nics,
            *(host_memory, price_per_hour, memory, bandwidth, bf16, float32),
        )
    )
    try:
        write_text(file, text)
    except OSError as error:
        raise UserError(f"cannot write {named(file)}: {error.strerror}") from error
    print("\n".join(check_cluster(cluster_named(str(file)))))
    print(f"written {file}: howdah plan MODEL --cluster {file}")


def _number(option: str, given: int | None, question: str, usual: str) -> int:
    said = None if given is None else str(given)
    return answer(option, said, question, usual, number(option))
