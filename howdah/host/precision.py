"""Which precisions a device computes in, and what to use where it lacks one."""

from collections.abc import Mapping

import torch

from howdah.base.errors import UserError
from howdah.host.card_findings import BF16

FP8 = (8, 9)  # the capability from which GPUs multiply in 8 bits


def require_precision(precision: str, device: str) -> None:
    """Raises UserError if the cards of this machine cannot multiply in `precision`.

    device  cpu or cuda
    """
    for name, capability in _cards(device):
        if lack := lacks(precision, name, capability):
            raise UserError(lack)


def lacks(precision: str, name: str, capability: tuple[int, int] | None) -> str:
    """Why a device cannot compute in `precision`, and what to use; empty if it can.

    capability  of a card; None: a CPU
    """
    if precision != "fp8" or (capability is not None and capability >= FP8):
        return ""
    needs = "method.precision=fp8 needs a GPU of capability 8.9 or more (H100, L40S, RTX 40)"
    if capability is None:
        return f"{needs}, and this run computes on the {name}; use method.precision=bf16"
    instead = "bf16" if capability >= BF16 else "float32"
    has = ".".join(map(str, capability))
    return f"{needs}, and {name} has {has}; use method.precision={instead}"


def precision_lines(precision: str, device: str) -> list[str]:
    """What a run tells of its precision on this device: that float32 is faster, if it is."""
    slow = {name for name, capability in _cards(device) if capability and capability < BF16}
    if device == "cpu" and bf16_instructions(cpu_capabilities()) == []:
        slow = {"this processor"}  # some 80 times as slow as float32 on one with AVX2 alone
    if precision != "bf16" or not slow:
        return []
    name, faster = min(slow), "many times as fast" if device == "cpu" else "faster"
    return [f"device      {name} has no arithmetic in bf16; method.precision=float32 is {faster}"]


def cpu_capabilities() -> Mapping[str, object] | None:
    """The CPU's instruction sets by name; None in a torch release that cannot list them."""
    ask = getattr(torch.cpu, "get_capabilities", None)
    return None if ask is None else ask()


def bf16_instructions(capabilities: Mapping[str, object] | None) -> list[str] | None:
    """The names of a CPU's instruction sets for bf16, in order; None where that is not known."""
    if capabilities is None:
        return None
    return sorted(name for name, there in capabilities.items() if "bf16" in name and there)


def _cards(device: str) -> list[tuple[str, tuple[int, int] | None]]:
    """Name and capability of each card that a run uses here."""
    if device != "cuda":
        return [("CPU", None)]
    cards = range(torch.cuda.device_count())
    return [(torch.cuda.get_device_name(i), torch.cuda.get_device_capability(i)) for i in cards]
