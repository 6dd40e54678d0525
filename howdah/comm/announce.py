"""The launcher's store, and one rank's word to all others through it, before they are connected."""

import re
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from howdah.base.errors import UserError
from howdah.comm.settings import read_settings

WORD, WRONG = "word", "!"
IN_USE = re.compile(r"port: (\d+).*EADDRINUSE")


def launchers_store(seconds: float) -> tuple[dist.Store, int, int]:
    """The store of the ranks that a launcher started, this rank's number, and how many they are.
    Raises UserError.
    """
    try:
        found = dist.rendezvous("env://", timeout=timedelta(seconds=seconds))
        store, rank, size = next(iter(found))
        return store, rank, size
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
    store, _, _ = launchers_store(seconds)
    mine = dist.PrefixStore(f"howdah/{read_settings().restart}/announced", store)
    if first:
        try:
            word = decide()
        except UserError as problem:
            mine.set(WORD, f"{WRONG}{problem}")
            raise
        mine.set(WORD, word)
        return word, store
    word = mine.get(WORD).decode()
    if word.startswith(WRONG):
        raise UserError(word.removeprefix(WRONG))
    return word, store
