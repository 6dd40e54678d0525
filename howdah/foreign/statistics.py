"""Module buffers, such as the running statistics of a batch norm: what happens to them is declared.

    mean      after each step the mean over the processes, on all of them
    rank 0    after each step that of rank 0, on all of them
    local     each process has its own; another process that reads a checkpoint gets that of rank 0
    constant  as it was when the model was built; a step that changes it is an error

A buffer that nobody has declared is refused, for whichever choice were made in silence would be
wrong for some model. All begin as those of rank 0. A mean is of floating-point numbers: a counter
(`num_batches_tracked`) is alike on all processes, and is that of rank 0.
"""

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from howdah.base.errors import UserError, nearest, shown
from howdah.comm.group import Group
from howdah.plan.boxes import Piece, whole_piece

RULES = ("mean", "rank 0", "local", "constant")


class Statistics:
    """The buffers of `model` under the rules of the user, by pattern of names. Raises UserError."""

    def __init__(self, model: nn.Module, rules: Mapping[str, str], world: Group) -> None:
        self._world, self._model = world, model
        self.rules = rules_of(model, rules)
        self._versions: dict[str, tuple[int, int]] = {}

    def share(self) -> None:
        """Makes all buffers those of rank 0. All ranks call together."""
        for _, buffer in self._model.named_buffers():
            self._send(buffer)
        self._mark()

    def after_step(self) -> None:
        """Does what is declared. All ranks call together."""
        names = dict(self._model.named_buffers())
        for name, before in self._versions.items():
            if _version(names[name]) != before:
                raise UserError(
                    f"the buffer {name} is declared constant, and this step has changed it; say "
                    '"mean", "rank 0" or "local"'
                )
        means = [names[n] for n, rule in self.rules.items() if rule == "mean"]
        floats = [buffer for buffer in means if buffer.is_floating_point()]
        for dtype in dict.fromkeys(buffer.dtype for buffer in floats):
            some = [buffer for buffer in floats if buffer.dtype == dtype]
            flat = torch.cat([buffer.reshape(-1) for buffer in some])
            self._world.all_reduce(flat)
            flat /= self._world.size
            parts = torch.split(flat, [buffer.numel() for buffer in some])
            for buffer, part in zip(some, parts, strict=True):
                buffer.copy_(part.view(buffer.shape))
        for name, rule in self.rules.items():
            counts = rule == "mean" and not names[name].is_floating_point()
            if rule == "rank 0" or counts:
                self._send(names[name])

    def bytes_of_step(self) -> tuple[dict[int, int], list[int]]:
        """What a step sends: elements of a mean by bytes of an element, and bytes of broadcasts."""
        names, means, sent = dict(self._model.named_buffers()), dict[int, int](), list[int]()
        for name, rule in self.rules.items():
            buffer = names[name]
            if rule == "mean" and buffer.is_floating_point():
                size = buffer.element_size()
                means[size] = means.get(size, 0) + buffer.numel()
            elif rule in ("mean", "rank 0"):
                sent.append(buffer.nbytes)
        return means, sent

    def entries(self) -> Iterator[tuple[str, Piece, Tensor]]:
        """The pieces that this rank saves."""
        for name, buffer in self._model.named_buffers():
            flat = buffer.detach().reshape(-1)
            piece = whole_piece(name, tuple(buffer.shape))
            if self._world.rank == 0:
                yield "buffer", piece, flat
            elif self.rules[name] == "local":
                yield f"buffer of rank {self._world.rank}", piece, flat

    def restore(self, checkpoint: Any) -> None:
        """Reads the buffers from a checkpoint."""
        own = f"buffer of rank {self._world.rank}"
        with torch.no_grad():
            for name, buffer in self._model.named_buffers():
                there = own in checkpoint.kinds and name in checkpoint.names(own)
                flat = torch.empty(buffer.numel(), dtype=buffer.dtype, device=buffer.device)
                piece = whole_piece(name, tuple(buffer.shape))
                checkpoint.read(own if there else "buffer", piece, flat)
                buffer.copy_(flat.view(buffer.shape))
        self._mark()

    def copied(self) -> dict[str, Tensor]:
        """Copies of all buffers."""
        return {name: buffer.clone() for name, buffer in self._model.named_buffers()}

    def put_back(self, copies: Mapping[str, Tensor]) -> None:
        """Restores what `copied` has returned."""
        with torch.no_grad():
            for name, buffer in self._model.named_buffers():
                if not torch.equal(buffer, copies[name]):
                    buffer.copy_(copies[name])
        self._mark()

    def _mark(self) -> None:
        self._versions = {
            name: _version(buffer)
            for name, buffer in self._model.named_buffers()
            if self.rules[name] == "constant"
        }

    def _send(self, buffer: Tensor) -> None:
        if not buffer.numel() or self._world.size == 1:
            return
        flat = buffer.detach().contiguous().reshape(-1)
        self._world.broadcast(flat.view(torch.uint8) if flat.dtype == torch.bool else flat, 0)
        if self._world.rank > 0:
            with torch.no_grad():
                buffer.copy_(flat.view(buffer.shape))


def rules_of(model: nn.Module, rules: Mapping[str, str]) -> dict[str, str]:
    """By name of a buffer, its rule: that of the last pattern that names it. Raises UserError."""
    if not isinstance(rules, Mapping):
        raise UserError(f'buffers is {shown(rules)}; give rules by pattern: {{"*": "mean"}}')
    names = [name for name, _ in model.named_buffers()]
    found: dict[str, str] = {}
    for pattern, rule in rules.items():
        if rule not in RULES:
            raise UserError(f"buffers: {shown(rule)} is no rule{nearest(str(rule), RULES)}")
        some = [name for name in names if fnmatchcase(name, pattern)]
        if not some:
            raise UserError(
                f"buffers: no buffer is called {shown(pattern)}{nearest(pattern, names)}"
            )
        found.update(dict.fromkeys(some, rule))
    missing = [name for name in names if name not in found]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UserError(
            f"nobody has declared what processes do with the buffer {missing[0]}{more}; say "
            f'buffers={{"*": "mean"}}, or "rank 0", "local" or "constant" by pattern of names'
        )
    return {name: found[name] for name in names}


def _version(buffer: Tensor) -> tuple[int, int]:
    return id(buffer), buffer._version
