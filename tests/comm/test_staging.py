"""Staging: what reaches a transport, and what comes back; through pinned memory only what moves."""

from functools import partial

import pytest
import torch
from played_streams import Played
from torch.utils._python_dispatch import TorchDispatchMode

from howdah.comm.staging import DIRECT, Pinned

FORMS = {
    "flat": lambda: torch.arange(12.0),
    "of two dims": lambda: torch.arange(12.0).view(6, 2),
    "strided": lambda: torch.arange(24.0).view(12, 2)[:, 0],
    "turned": lambda: torch.arange(12.0).view(2, 6).t(),
    "one number": lambda: torch.tensor(3.0),
    "empty": lambda: torch.empty(0, 3),
    "of no sums": lambda: torch.arange(12).bool(),
}


def stages():
    room = partial(torch.empty, dtype=torch.uint8)
    return {"direct": DIRECT, "pinned": Pinned(Played(), room)}


@pytest.mark.parametrize("kind", stages())
@pytest.mark.parametrize("form", FORMS)
def test_there_and_back(kind, form):
    stage, x = stages()[kind], FORMS[form]()
    taken = stage.take(x)
    assert taken.ndim == 1 and taken.is_contiguous()
    assert torch.equal(taken.view(x.dtype), x.reshape(-1))
    taken.copy_(taken.clone().flip(0))
    expected = taken.clone().view(x.dtype).view(x.shape)
    stage.give(x, taken)
    assert torch.equal(x, expected)


def test_only_flat_tensors_are_lent_themselves():
    x = torch.arange(12.0)
    assert DIRECT.take(x).data_ptr() == x.data_ptr()
    assert DIRECT.take(x.view(6, 2).t()).data_ptr() != x.data_ptr()


def test_autograd_notices_what_is_written():
    for stage in stages().values():
        x = torch.ones(3)
        y = torch.ones(3, requires_grad=True)
        out = (y * x).sum()
        taken = stage.take(x)
        stage.give(x, taken)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.backward()


class Copied(TorchDispatchMode):
    """Counts the elements that are copied."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name == "aten::copy_":
            self.elements += args[0].numel()
        return func(*args, **(kwargs or {}))


def test_only_rows_that_move_are_copied():
    stage, x = stages()["pinned"], torch.arange(12.0).view(6, 2)
    with Copied() as down:
        taken = stage.take(x, (2, 4))
    assert down.elements == 4 and taken[4:8].tolist() == [4, 5, 6, 7]
    taken.fill_(9.0)
    with Copied() as up:
        stage.give(x, taken, [(0, 2), (4, 6)])
    assert up.elements == 8
    assert x.tolist() == [[9, 9], [9, 9], [4, 5], [6, 7], [9, 9], [9, 9]]


def test_pinned_memory_is_used_again_and_what_is_lent_stays():
    stage = stages()["pinned"]
    stage.begin(stage.called())
    first, second = stage.take(torch.ones(100)), stage.take(torch.zeros(1000))
    assert first.tolist() == [1.0] * 100 and second.tolist() == [0.0] * 1000
    stage.begin(stage.called())
    stage.take(torch.ones(1000))
    room = stage._room.data_ptr()
    stage.begin(stage.called())
    stage.take(torch.ones(500))
    assert stage._room.data_ptr() == room
