"""Storage: how what is not on the device is kept and moved. It changes no number of a run."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from howdah.base.bounds import Bound
from howdah.plan.layout import Layout
from howdah.plan.method import Method

WINDOW = 2  # units of weights: the one in use, and the next
SETS = 3  # of buffers for an update: one comes, one is worked on, one goes


def staying(window: int) -> int:
    """Of the units of a window, how many may stay until they are used again: the one in use and
    the next come and go (the traffic of ZeRO-3), and a wider window keeps what is used soon.
    """
    return window if window > WINDOW else 1


@dataclass(frozen=True)
class Storage:
    """The table [storage] of a recipe.

    folder          of the file of states that have their home on the disk; empty: scratch/ in the
                    run folder
    direct          whether the file is read and written past the page cache (O_DIRECT)
    threads         that read and write it at the same time; of io_uring, blocks on their way
    io              what reads and writes it: io_uring, threads; auto: io_uring where the kernel
                    allows it
    window          units whose weights are on the device at a time, with zero3 or where weights
                    have another home: the one in use, and those that come
    pool            bytes of the buffers through which an update moves states; 0: as many as are
                    useful, which is three times the largest unit
    host_bandwidth  bytes/s between device and host, to try a slower link; 0: as fast as it is
    disk_bandwidth  bytes/s of the disk, likewise
    """

    folder: str = ""
    direct: bool = False
    threads: Annotated[int, Bound(1, 64)] = 4
    io: Literal["auto", "io_uring", "threads"] = "auto"
    window: Annotated[int, Bound(2, 1000)] = WINDOW
    pool: Annotated[int, Bound(0, 1 << 50)] = 0
    host_bandwidth: Annotated[float, Bound(0, 1e15)] = 0.0
    disk_bandwidth: Annotated[float, Bound(0, 1e15)] = 0.0


def settled(storage: Storage, layout: Layout, run: Path) -> Storage:
    """The storage of a run whose folder is `run`; it is as it was where no home is the disk."""
    homes = layout.weights, layout.gradients, layout.optimizer, layout.activations
    if "disk" not in homes:
        return storage
    return replace(storage, folder=str(Path(storage.folder or run / "scratch").absolute()))


def delay_problems(layout: Layout, method: Method) -> Iterator[str]:
    """Why an update cannot be a step late (`method.optimizer.delay`), as sentences."""
    if not method.optimizer.delay:
        return
    if layout.optimizer != "host":
        yield (
            "method.optimizer.delay is of updates on the host, beside the next step; add "
            "optimizer=host to the layout"
        )
    elif "disk" in (layout.weights, layout.gradients):
        yield "method.optimizer.delay keeps states in memory; use weights and gradients=host"
    elif layout.weights == "host" and method.precision in ("float32", "float64"):
        yield (
            f"method.optimizer.delay changes masters while weights are used, and weights=host in "
            f"{method.precision} has them in one place; use method.precision=bf16, or leave out "
            "weights=host"
        )
