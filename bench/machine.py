"""What a benchmark ran on, in a sentence."""

import torch

from howdah.host.facts import allowed_cores, cpu_model


def machine(threads: int = 1) -> str:
    """The machine, without its name; each process of the benchmark has so many threads."""
    build = "CPU build" if torch.version.cuda is None else f"CUDA {torch.version.cuda} build"
    version = ".".join(torch.__version__.split(".")[:2])
    each = "one thread" if threads == 1 else f"{threads} threads"
    return (
        f"{allowed_cores()} cores ({cpu_model()}), {build} of torch {version}, {each} per process."
    )
