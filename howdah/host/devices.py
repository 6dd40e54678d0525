"""The device that a rank computes on, and the cards of this machine.

    find_cards    how many torch can use, and if none: why
    require_cards refuses a number of ranks that the cards cannot serve
    own_device    the device of a rank, made the current one

A rank makes its card the current one before anything else touches CUDA. Every call of torch that
names no device means the current card of its thread. Without that, each of eight ranks
would open a second context, of some 0.5 GB, on card 0.

Where a machine has more ranks than cards, ranks share: rank r takes card r modulo their number.
"""

import subprocess
import warnings
from typing import NamedTuple

import torch

from howdah.base.errors import UserError, brief
from howdah.host.facts import has_card

CPU = "use device=cpu"
ONE_PROCESS = ("Exclusive_Process", "Prohibited")  # modes in which processes cannot share a card


class Cards(NamedTuple):
    """The cards that torch can use.

    usable  how many
    lack    why there are none, to follow "device is cuda, but "; empty where there are some
    """

    usable: int
    lack: str = ""


def find_cards(visible: str | None = None) -> Cards:
    """The cards that torch can use in this process.

    visible  what CUDA_VISIBLE_DEVICES says; None if it is not set
    """
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        usable = torch.cuda.is_available()  # which warns of what it finds wrong
    if usable:
        return Cards(torch.cuda.device_count())
    built = torch.version.cuda and f"CUDA {torch.version.cuda}"
    if torch.version.hip:
        built = f"ROCm {torch.version.hip}"
    warned = next((str(one.message) for one in heard if "CUDA" in str(one.message)), "")
    return Cards(0, why_none(warned, built, present=has_card(), visible=visible))


def why_none(warned: str, built: str | None, *, present: bool, visible: str | None) -> str:
    """Why torch can use no card, and what to do, as the second half of a sentence.

    warned   what torch has warned of; empty if of nothing
    built    what this torch was built for, such as CUDA 12.8; None: for the CPU alone
    present  whether the system has a card
    visible  what CUDA_VISIBLE_DEVICES says; None if it is not set
    """
    if built is None and present:
        return (
            f"this torch was built for the CPU alone; install a build with CUDA for the card that "
            f"is here, or {CPU}"
        )
    if "too old" in warned:
        found = _version(warned.partition("found version ")[2].partition(")")[0])
        return (
            f"the driver{found} is too old for this torch, which was built for {built}; update the "
            f"driver, install a torch that was built for an older CUDA, or {CPU}"
        )
    if built and present and visible is not None:
        return (
            f"CUDA_VISIBLE_DEVICES is {visible!r}, which leaves torch no card of this machine; "
            f"name some of its cards there, or {CPU}"
        )
    if built and present:
        said = warned.partition("CUDA initialization: ")[2].partition(". ")[0]
        why = f" ({brief(said)})" if said else ""
        return (
            f"torch, built for {built}, cannot open the card that is here{why}; see that the "
            f"driver works (nvidia-smi) and that this user may use it, or {CPU}"
        )
    return f"torch sees no CUDA device here; {CPU}"


def _version(number: str) -> str:
    """The version of CUDA in a number such as 12040, in brackets; empty if it is none."""
    if not number.isdecimal():
        return ""
    return f" (for CUDA {int(number) // 1000}.{int(number) % 1000 // 10})"


def require_cards(ranks: int, *, visible: str | None = None) -> None:
    """Raises UserError if this machine has no card, or if its cards cannot be shared by `ranks`."""
    found = find_cards(visible)
    if found.lack:
        raise UserError(f"device is cuda, but {found.lack}")
    if ranks > found.usable and (mode := _one_process()):
        raise UserError(
            f"{ranks} ranks of this machine would share {_cards(found.usable)}, which the driver "
            f"gives to one process each ({mode}): start {found.usable}, or set nvidia-smi -c "
            "DEFAULT"
        )


def _one_process() -> str:
    """The mode in which the driver keeps some card for one process; empty if it is not known."""
    command = ["nvidia-smi", "--query-gpu=compute_mode", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return next((mode for mode in said.stdout.split() if mode in ONE_PROCESS), "")


def own_device(kind: str, local_rank: int) -> torch.device:
    """The device of a rank of this machine, made the current one. It may be called again.

    kind  cpu or cuda

    Raises UserError if there is no card, or if this process cannot open its own.
    """
    if kind == "cpu":
        return torch.device("cpu")
    found = find_cards()
    if found.lack:
        raise UserError(f"device is cuda, but {found.lack}")
    device = torch.device("cuda", local_rank % found.usable)
    # sums in float32: by default parts of a product may be added in bf16
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    try:
        torch.cuda.set_device(device)
        torch.cuda.synchronize(device)  # opens the context
    except RuntimeError as error:
        raise UserError(
            f"rank {local_rank} of this machine cannot open {device} ({brief(error)}): start no "
            "more ranks than its memory and its mode allow (nvidia-smi)"
        ) from None
    return device


def device_lines(device: torch.device, ranks: int) -> list[str]:
    """What a run tells of its device and of those that share it; nothing of a CPU.

    ranks  the ranks of this machine
    """
    if device.type != "cuda":
        return []
    facts, count = torch.cuda.get_device_properties(device), torch.cuda.device_count()
    line = f"device      {facts.name}, {facts.total_memory / 2**30:.1f} GiB"
    return [line, f"device      {shared}"] if (shared := sharing(ranks, count)) else [line]


def sharing(ranks: int, cards: int) -> str:
    """A sentence where ranks of a machine share its cards; empty where each has its own."""
    if ranks <= cards:
        return ""
    most = -(-ranks // cards)
    return (
        f"{ranks} ranks of this machine share {_cards(cards)}, up to {most} on one: they compute "
        "in turns, and share its memory"
    )


def _cards(count: int) -> str:
    return f"{count} card{'s' * (count != 1)}"
