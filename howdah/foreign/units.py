"""The units of a module that is not howdah's: named submodules, and what is left.

    resnet18      conv1  bn1   layer1.0 … layer4.1   fc
    units         └─ rest ─┘   one each              one

A unit is gathered and released together (zero3), or computed again in the backward pass
(recompute=full); so it has to be a submodule that the model calls. Without a list from the user,
units are found from the root down: lists of modules are opened, and so is a module with more than a
quarter of the parameters that is no entry of a ModuleList. What torch has built of several modules,
such as an attention, stays whole, for it may use a submodule without calling it.

The rest are parameters in no unit, those of several units (tied), and units with less than a
thousandth of all elements, whose messages would be small. It is whole during a pass.
"""

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from torch import nn

from howdah.base.errors import UserError, nearest, shown

REST = "the rest"
LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
STACKS = (nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder)  # torch's, of layers
NEVER_CALLED = (nn.ModuleList, nn.ModuleDict)
OPENED = 4  # a module with more than one part in so many is opened
SMALL = 1000  # a unit with less than one part in so many is none


def choose_units(model: nn.Module, wanted: Sequence[str] | None) -> list[str]:
    """The paths of the submodules that are units, in the order of the model.

    wanted  paths, or patterns such as "layers.*", that the user gives; None: they are found

    Raises UserError for a pattern that names none, for a list of modules, and for units inside of
    one another.
    """
    total = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if wanted is None:
        own = own_elements(model, [*dict.fromkeys(_found(model, "", total))])
        return [path for path, elements in own.items() if elements * SMALL >= total]
    if isinstance(wanted, str) or not all(isinstance(pattern, str) for pattern in wanted):
        raise UserError(f"units is {shown(wanted)}; give a list of paths or patterns of submodules")
    paths = {path: module for path, module in model.named_modules() if path}
    chosen: dict[str, None] = {}
    for pattern in wanted:
        parts = pattern.count(".")
        some = [p for p in paths if fnmatchcase(p, pattern) and p.count(".") == parts]
        if not some:
            raise UserError(
                f"units: no submodule is called {shown(pattern)}{nearest(pattern, paths)}"
            )
        chosen.update(dict.fromkeys(some))
    for path in chosen:
        if isinstance(paths[path], NEVER_CALLED):
            raise UserError(
                f"units: {path} is a {type(paths[path]).__name__}, which the model does not call; "
                f'name what is in it: "{path}.*"'
            )
        inside = next((other for other in chosen if other.startswith(f"{path}.")), None)
        if inside:
            raise UserError(f"units: {inside} is inside of {path}; name one of the two")
    return [path for path in paths if path in chosen]


def _found(module: nn.Module, path: str, total: int) -> Iterator[str]:
    for name, child in module.named_children():
        elements = sum(p.numel() for p in child.parameters() if p.requires_grad)
        inner = any(True for _ in child.children())
        torchs = type(child).__module__.startswith("torch.nn") and not isinstance(child, STACKS)
        below = f"{path}{name}"
        if not elements:
            continue
        large = isinstance(child, LISTS) or (inner and not torchs and elements * OPENED > total)
        if isinstance(child, NEVER_CALLED) or (large and not isinstance(module, NEVER_CALLED)):
            yield from _found(child, f"{below}.", total)
        else:
            yield below


def own_elements(model: nn.Module, units: Sequence[str]) -> dict[str, int]:
    """By unit, the elements of the trained parameters that no other unit has."""
    owners = owners_of(model, units)
    counts = dict.fromkeys(units, 0)
    for name, parameter in model.named_parameters():
        if owners[name] in counts and parameter.requires_grad:
            counts[owners[name]] += parameter.numel()
    return counts


def owners_of(model: nn.Module, units: Sequence[str]) -> dict[str, str]:
    """By name of a parameter, its unit or REST. A tied parameter has the first of its names."""
    first = {id(parameter): name for name, parameter in reversed([*model.named_parameters()])}
    users: dict[str, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        inside = [unit for unit in units if name.startswith(f"{unit}.")]
        users.setdefault(first[id(parameter)], set()).update(inside or [REST])
    return {name: some.pop() if len(some) == 1 else REST for name, some in users.items()}
