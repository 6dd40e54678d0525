"""Which precisions a device computes in, and what to use where it lacks one."""

from collections.abc import Iterator

from howdah.base.errors import UserError
from howdah.host.facts import bf16_instructions

BF16 = (8, 0)  # the capability from which GPUs have arithmetic in bf16
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


def precision_notes(precision: str, device: str) -> Iterator[str]:
    """Yields that float32 is faster than the chosen precision on this device, if it is."""
    slow = {name for name, capability in _cards(device) if capability and capability < BF16}
    if device == "cpu" and bf16_instructions() == []:
        slow = {"this processor"}  # some 80 times as slow as float32 on one with AVX2 alone
    if precision == "bf16" and slow:
        faster = "many times as fast" if device == "cpu" else "faster"
        yield f"{min(slow)} has no arithmetic in bf16; method.precision=float32 is {faster}"


def _cards(device: str) -> list[tuple[str, tuple[int, int] | None]]:
    """Name and capability of each card that a run uses here."""
    if device != "cuda":
        return [("CPU", None)]
    import torch

    cards = range(torch.cuda.device_count())
    return [(torch.cuda.get_device_name(i), torch.cuda.get_device_capability(i)) for i in cards]
