"""Sites: which ranks see which run folder.

    one folder that all see           a folder on each machine, under one path
    site 0: ranks 0 1 2 3             site 0: ranks 0 1      site 2: ranks 2 3

A site is named by its first rank, which publishes the site's checkpoints. Ranks of one site meet in
their folder; those of several sites meet on a board, in the launcher's store: the thread of a save
makes no collectives.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from howdah.base.errors import UserError
from howdah.comm.group import Group


class Board:
    """Texts that ranks leave for one another, save after save. All ranks begin every save, when the
    last one has ended on all of them.

    store  of all ranks; other threads may use it. It keeps what was posted last under a name
    """

    def __init__(self, store: dist.Store) -> None:
        self._store, self._turn = store, 0

    def begin(self) -> None:
        """The next save begins: what was posted for the last one is not seen any more."""
        self._turn += 1

    def post(self, name: str, text: str) -> None:
        """Leaves a text for the others."""
        self._asked(partial(self._store.set, f"save/{name}", f"{self._turn} {text}"))

    def look(self, name: str) -> str | None:
        """The text that a rank has left under a name; None: there is none yet."""
        key = f"save/{name}"
        if not self._asked(partial(self._store.check, [key])):
            return None
        turn, _, text = self._asked(partial(self._store.get, key)).decode().partition(" ")
        return str(text) if turn == str(self._turn) else None

    def _asked(self, ask: Callable[[], Any]) -> Any:
        try:
            return ask()
        except RuntimeError as error:
            said = str(error).splitlines()[0]
            raise UserError(f"the launcher's store cannot be reached: {said}") from None


@dataclass(frozen=True)
class Team:
    """The ranks of a run as one of them sees them.

    sites  of each rank, the first rank that sees the same run folder
    board  where ranks of several sites meet; None: there is one site
    host   the name of this rank's machine, which is written beside what it saves for one site of
           several
    """

    rank: int
    sites: tuple[int, ...]
    board: Board | None = None
    host: str = ""

    @property
    def leads(self) -> bool:
        """Whether this rank publishes the checkpoints of its site."""
        return self.sites[self.rank] == self.rank

    @property
    def leaders(self) -> list[int]:
        """The first rank of each site, that of rank 0 first."""
        return sorted(set(self.sites))

    @property
    def here(self) -> list[int]:
        """The ranks of this rank's site, itself among them."""
        return [r for r, site in enumerate(self.sites) if site == self.sites[self.rank]]

    @property
    def away(self) -> list[int]:
        """The ranks of other sites."""
        return [r for r, site in enumerate(self.sites) if site != self.sites[self.rank]]


def one_site(rank: int, world: int) -> Team:
    """The team of ranks that all see one folder."""
    return Team(rank, (0,) * world)


def find_sites(mark: Path, world: Group, nodes: Sequence[int]) -> tuple[int, ...]:
    """Finds which ranks see rank 0's file `mark`, by what rank 0 writes into it; returns the sites
    of all ranks. All ranks call together.

    nodes  of each rank, the number of its machine; none: there is one machine

    Raises UserError when some machines see the file and others do not.
    """
    if len(set(nodes)) < 2:
        return (0,) * world.size
    told = float(int.from_bytes(os.urandom(6), "little")) if world.rank == 0 else 0.0
    if world.rank == 0:
        mark.write_text(f"{told:.0f}\n", encoding="utf-8")
    (told,) = world.sum_scalars([told])
    mine = [0.0] * world.size
    mine[world.rank] = float(_reads(mark) == f"{told:.0f}")
    sees = [count > 0 for count in world.sum_scalars(mine)]
    if all(sees):
        return (0,) * world.size
    if sees != [node == nodes[0] for node in nodes]:
        blind = sees.index(False)
        seeing = next((r for r in range(1, world.size) if sees[r]), 0)
        raise UserError(
            f"rank {seeing} sees the run folder {mark.parent} of rank 0, and rank {blind} does "
            "not: share it between all ranks of a machine, and between all machines or none"
        )
    return tuple(nodes.index(node) for node in nodes)


def _reads(mark: Path) -> str:
    """The words of a file, or none. The folder is listed first: a network's file system then asks
    its server whether a name that was not there has come.
    """
    try:
        os.listdir(mark.parent)
        return mark.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""
