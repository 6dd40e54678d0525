"""howdah: plan, verify, train and resume transformer language models on more than one device.

The names below are those that a script needs. Each is imported at its first use, so that
`import howdah` is fast and does not load torch.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "UserError": "howdah.base.errors",
    "Layout": "howdah.plan.layout",
    "Method": "howdah.plan.method",
    "ModelShape": "howdah.shapes.shape",
    "Workers": "howdah.comm.spawn",
    "apply": "howdah.parallel.apply",
    "distribute": "howdah.foreign.distribute",
    "full_gradient": "howdah.parallel.full_tensors",
    "full_parameter": "howdah.parallel.full_tensors",
    "full_state": "howdah.parallel.full_tensors",
    "load_run": "howdah.config.recipe",
    "open_run": "howdah.train.finished_run",
    "parse_layout": "howdah.plan.layout",
    "pipeline": "howdah.tasks.pipelines",
    "preset": "howdah.shapes.presets",
    "resolve_run": "howdah.config.recipe",
    "verify_step": "howdah.foreign.one_process",
    "train_run": "howdah.cli.train_run",
}

__all__ = sorted(_HOMES)  # noqa: PLE0605 (a list of strings, made where the names are)


def __getattr__(name: str) -> Any:
    """The object called `name`, imported from its module. Raises AttributeError."""
    if name not in _HOMES:
        raise AttributeError(f"module 'howdah' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
