"""The doctor's findings on cards: what they are, what torch has for them, how they are joined.

    read_cards  asks torch and the driver   →   judge_cards decides (pure)   →   findings

Of a machine without a card there is one line. Which wire joins two cards (NVLink, PCIe) torch does
not tell, only whether they reach each other's memory without the host.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import torch

from howdah.host.devices import find_cards
from howdah.host.finding import Finding, in_words
from howdah.host.precision import BF16

DRIVER = Path("/proc/driver/nvidia/version")


class Card(NamedTuple):
    """One card: its name, bytes of memory, and CUDA capability."""

    name: str
    memory: int
    capability: tuple[int, int]


class CardsHere(NamedTuple):
    """What this machine and this torch have.

    lack     why torch can use no card
    driver   its version; empty where the system does not tell
    built    the CUDA version that torch was built for
    nccl     the version of NCCL in torch; empty: there is none
    kernels  what torch was compiled for, such as sm_90 and compute_120
    apart    pairs of cards that do not reach each other's memory
    """

    cards: Sequence[Card] = ()
    lack: str = ""
    driver: str = ""
    built: str = ""
    nccl: str = ""
    kernels: Sequence[str] = ()
    apart: Sequence[tuple[int, int]] = ()


def read_cards() -> CardsHere:
    """Asks torch and the driver."""
    found = find_cards()
    if found.lack:
        return CardsHere(lack=found.lack)
    facts = [torch.cuda.get_device_properties(i) for i in range(found.usable)]
    nccl = ""
    with suppress(AttributeError, RuntimeError):  # a torch without it
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return CardsHere(
        cards=[Card(one.name, one.total_memory, (one.major, one.minor)) for one in facts],
        driver=parse_driver(DRIVER.read_text("utf-8") if DRIVER.is_file() else ""),
        built=torch.version.cuda or torch.version.hip or "",
        nccl=nccl,
        kernels=torch.cuda.get_arch_list(),
        apart=[
            pair
            for pair in combinations(range(found.usable), 2)
            if not torch.cuda.can_device_access_peer(*pair)
        ],
    )


def parse_driver(text: str) -> str:
    """The version in the text of /proc/driver/nvidia/version; empty if there is none."""
    for line in text.splitlines():
        words = line.split()
        if line.startswith("NVRM version:"):
            return next((word for word in words if word[:1].isdigit() and "." in word), "")
    return ""


def judge_cards(here: CardsHere) -> Iterator[Finding]:
    """Yields the findings on cards; one where there are none."""
    if not here.cards:
        none = "torch sees no CUDA device" in here.lack
        value = "none; runs train on the CPU" if none else "none usable"
        yield Finding("devices", value, None if none else here.lack)
        return
    count = len(here.cards)
    yield Finding("devices", f"{count}: {', '.join(_kinds(here.cards))}", _of_cards(here))
    versions = [f"{here.driver}" if here.driver else "of unknown version"]
    versions.append(f"torch is built for CUDA {here.built}, {_nccl(here)}")
    no_nccl = "this torch has no NCCL, so what ranks send goes through the host's memory"
    yield Finding(
        "driver",
        "; ".join(versions),
        None if here.nccl or count == 1 else f"{no_nccl}: install a build that has it",
    )
    if count > 1:
        yield _links(count, here.apart)
    yield Finding("ranks", f"a card for each, up to {count} on this machine; more share cards")


def _kinds(cards: Sequence[Card]) -> list[str]:
    """Each kind of card, with its number where there are several kinds."""
    kinds = list(dict.fromkeys(cards))
    told = [
        f"{name}, {in_words(memory)}, capability {major}.{minor}"
        for name, memory, (major, minor) in kinds
    ]
    if len(kinds) == 1:
        return told
    counts = [sum(card == kind for card in cards) for kind in kinds]
    return [f"{count} x {one}" for count, one in zip(counts, told, strict=True)]


def _nccl(here: CardsHere) -> str:
    return f"NCCL {here.nccl}" if here.nccl else "without NCCL"


def _of_cards(here: CardsHere) -> str | None:
    for card in here.cards:
        major, minor = card.capability
        if here.kernels and not has_kernels(card.capability, here.kernels):
            return (
                f"this torch has no kernels for {card.name} (capability {major}.{minor}): install "
                "a build that has them"
            )
    for card in here.cards:
        if card.capability < BF16:
            return (
                f"{card.name} has no arithmetic in bf16: method.precision=float32 is faster on it"
            )
    if len(set(here.cards)) > 1:
        return "the cards differ: in a step, all ranks wait for those on the slowest"
    return None


def has_kernels(capability: tuple[int, int], kernels: Sequence[str]) -> bool:
    """Whether kernels like sm_80 run on a card: those of its own major version up to its minor one.
    What is compiled when it is loaded, like compute_120, runs on all later cards.
    """
    for kernel in kernels:
        kind, _, number = kernel.partition("_")
        digits = number.rstrip("af")  # sm_90a: for this card alone
        if not digits.isdecimal():
            return True  # a form that is not known here
        made = int(digits[:-1]), int(digits[-1])
        same = made[0] == capability[0] and made <= capability
        if same if kind == "sm" else made <= capability:
            return True
    return False


def _links(count: int, apart: Sequence[tuple[int, int]]) -> Finding:
    pairs = count * (count - 1) // 2
    if not apart:
        return Finding("links", f"all {count} cards reach each other's memory")
    first = f"cards {apart[0][0]} and {apart[0][1]}"
    rest = f" and {len(apart) - 1} more pairs" if len(apart) > 1 else ""
    return Finding(
        "links",
        f"{pairs - len(apart)} of {pairs} pairs of cards reach each other's memory",
        f"{first}{rest} do not: what they send goes through the host's memory; see nvidia-smi topo "
        "-m, and whether ACS or an IOMMU keeps them apart",
    )
