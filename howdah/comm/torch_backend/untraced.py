"""Keeps torch.compile out of the backend's own code.

A compiled program calls a process group also where nothing is compiled: DDP's reducer does between
two steps, and so does whatever stands at a graph break. A group of C++ is not seen then; methods in
Python would be compiled as well, and torch 2.13 ends the program at the first attribute of theirs.
"""

from types import CodeType
from typing import Any, TypeVar

import torch

Class = TypeVar("Class", bound=type)
FRAMES: Any = getattr(torch._C._dynamo, "eval_frame", None)  # private; other versions may lack it


def untraced(cls: Class) -> Class:
    """The class, whose methods torch.compile runs as they are, with all that they call."""
    mark = getattr(FRAMES, "set_code_exec_strategy", None)
    if mark is not None:
        skip = FRAMES._FrameAction.SKIP
        for member in vars(cls).values():
            code = getattr(getattr(member, "fget", member), "__code__", None)
            if isinstance(code, CodeType):
                mark(code, FRAMES._FrameExecStrategy(skip, skip))
    return cls
