"""What a benchmark ran on, in sentences."""

from importlib.metadata import version
from pathlib import Path

import torch
from deepspeed_peer import AVAILABLE

from howdah.host.facts import allowed_cores


def machine() -> str:
    """The machine in a sentence, without its name."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    kind = next((line.split(":")[1].strip() for line in lines if "model name" in line), "a CPU")
    build = "CPU build" if torch.version.cuda is None else f"CUDA {torch.version.cuda} build"
    torch_version = ".".join(torch.__version__.split(".")[:2])
    return (
        f"{allowed_cores()} cores ({kind}), {build} of torch {torch_version}, "
        "one thread per process."
    )


def peers(*names: str) -> str:
    """The peers that are no part of torch, in a sentence; `names` beside DeepSpeed."""
    names = (*names, "deepspeed") if AVAILABLE else names
    found = " and ".join(f"{name} {version(name)}" for name in names) or "none"
    return f"Peers beside torch: {found}." + (
        "" if AVAILABLE else " DeepSpeed is not installed here and did not take part."
    )
