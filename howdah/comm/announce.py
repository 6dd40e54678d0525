"""One rank's word to all others before they are connected, through the launcher's store."""

from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from howdah.base.errors import UserError
from howdah.comm.settings import read_settings

WORD, WRONG = "word", "!"


def announce(
    decide: Callable[[], str], *, first: bool, seconds: float = 600
) -> tuple[str, dist.Store]:
    """What rank 0 decides, on every rank; and the store, which serves the others' reading while it
    is kept. Raises UserError on all ranks if rank 0 does.

    first    whether this is rank 0
    seconds  after which a rank that waits gives up
    """
    try:
        found = dist.rendezvous("env://", timeout=timedelta(seconds=seconds))
        store, _, _ = next(iter(found))
    except (ValueError, RuntimeError) as error:
        raise UserError(
            f"the launcher's store cannot be reached: {str(error).splitlines()[0]}"
        ) from None
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
