"""The launcher's store, and through it one rank's word to all others before they are connected."""

import re
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from time import sleep

import torch.distributed as dist

from howdah.base.errors import Unfinished, UserError
from howdah.comm.meeting import part
from howdah.comm.settings import read_settings
from howdah.text.interruptible import interruptible

WORD, WRONG, UNDONE = "word", "!", "?"
LOOK = 0.1  # seconds between looks at the store
IN_USE = re.compile(r"port: (\d+).*EADDRINUSE")


def launchers_store(seconds: float, *, whole: bool = False) -> tuple[dist.Store, int, int]:
    """The launcher's store, the number of this rank, and how many there are. A stop signal ends the
    wait for a store that cannot be reached. Raises UserError.

    whole  also waits for all ranks: for those that do not meet before one of them may end. Torch
           does not say which of them is missing; `meet` does
    """

    def reach() -> tuple[dist.Store, int, int]:
        settings = read_settings()
        if not settings.world:
            raise ValueError("the variable WORLD_SIZE is no number of ranks, or not set")
        way = "env://" if whole or settings.agent else "env://?world_size=-1"  # -1: waits for none
        store, rank, _ = next(iter(dist.rendezvous(way, timeout=timedelta(seconds=seconds))))
        return store, rank, settings.world

    try:
        return interruptible(reach)
    except ValueError as error:
        raise UserError(
            f"no launcher says who the ranks are; start with torchrun ({error})"
        ) from None
    except RuntimeError as error:
        said = str(error).splitlines()[0]
        if port := IN_USE.search(said):
            raise UserError(
                f"port {port[1]}, at which the ranks are to meet, is in use on the first machine: "
                "end what listens there, or give all ranks another --master-port"
            ) from None
        raise UserError(f"the launcher's store cannot be reached: {said}") from None


def announce(
    decide: Callable[[], str], *, first: bool, seconds: float = 600
) -> tuple[str, dist.Store]:
    """What rank 0 decides, on every rank; and the store, which serves the others' reading while it
    is kept. Raises UserError on all ranks if rank 0 does.

    first    whether this is rank 0
    seconds  after which a rank that waits gives up
    """
    store, rank, size = launchers_store(seconds)
    mine = dist.PrefixStore(f"howdah/{read_settings().restart}/announced", store)
    try:
        return announced(mine, decide, first=first), store
    except (UserError, Unfinished):
        part(mine, rank=rank, size=size)  # with rank 0 the store may end
        raise


def announced(
    store: dist.Store,
    decide: Callable[[], str],
    *,
    first: bool,
    heed: Callable[[], object] | None = None,
) -> str:
    """What rank 0 decides, on every rank that shares a store. Raises UserError and Unfinished on
    all if rank 0 does.

    first  whether this is rank 0
    heed   called while this rank waits, however long; may raise. None: a stop signal ends the wait,
           and so does the store's timeout
    """
    if first:
        try:
            word = decide()
        except (UserError, Unfinished) as problem:
            mark = WRONG if isinstance(problem, UserError) else UNDONE
            store.set(WORD, f"{mark}{problem}")
            raise
        store.set(WORD, word)
        return word
    while heed and not store.check([WORD]):
        heed()
        sleep(LOOK)
    word = interruptible(partial(store.get, WORD)).decode()
    if word.startswith(WRONG):
        raise UserError(word.removeprefix(WRONG))
    if word.startswith(UNDONE):
        raise Unfinished(word.removeprefix(UNDONE))
    return word
