"""What a benchmark ran on, in a sentence."""

import torch

from howdah.host.facts import allowed_cores, cpu_model


def machine() -> str:
    """The machine, without its name."""
    build = "CPU build" if torch.version.cuda is None else f"CUDA {torch.version.cuda} build"
    version = ".".join(torch.__version__.split(".")[:2])
    return (
        f"{allowed_cores()} cores ({cpu_model()}), {build} of torch {version}, "
        "one thread per process."
    )
