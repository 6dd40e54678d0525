"""The torch backend: what it refuses, and calls and ranks that do not fit together."""

import multiprocessing
import os
import signal
from datetime import timedelta
from time import monotonic

import pytest
import torch
import torch.distributed as dist
from test_backend import WIRES
from torch_ranks import ranks_of, told

import howdah.comm.backend
from howdah.base.errors import UserError
from howdah.comm.backend import require_alone, require_linux


@pytest.fixture(params=WIRES)
def ranks(workers, tmp_path, request):
    """Runs functions on two ranks."""
    return ranks_of(workers, tmp_path, request.param)


@pytest.fixture
def sharing(workers, tmp_path):
    """The same in shared memory alone."""
    return ranks_of(workers, tmp_path)


def test_other_systems_are_refused():
    for system, name in (("Windows", "Windows"), ("Darwin", "macOS")):
        with pytest.raises(UserError, match=f'needs Linux.*this is {name}: take "gloo"'):
            require_linux(system)
    require_linux("Linux")


def beside_nccl(rank):
    """Asks for a group of two backends."""
    return told(lambda: dist.new_group([0, 1], backend="cpu:howdah,cuda:nccl"))


def test_howdah_stands_alone(sharing):
    """torch 2.13 would take the group of the first device for all of them."""
    for kind, said in sharing(beside_nccl):
        assert kind == "UserError"
        assert '"cpu:howdah,cuda:nccl" asks for howdah beside another' in said
        assert 'write "howdah" alone' in said
    for sound in ("howdah", "HOWDAH", "cpu:howdah", "cpu:howdah,cuda:howdah"):
        require_alone(sound)


def means(rank):
    """Means that are not of the dtype of their terms, which torch hands on to a backend."""
    dtypes = torch.bool, torch.uint16, torch.int64
    xs = [torch.ones(2, dtype=dtype) for dtype in dtypes]
    return [told(dist.all_reduce, x, dist.ReduceOp.AVG)[1] for x in xs]


def test_a_mean_of_whole_numbers_names_their_dtype(sharing):
    """It named uint8 for bool, and int32 for uint16: what would have been sent."""
    sentence = "the mean of torch.{} is not of that dtype: reduce the sum, or cast it"
    for said in sharing(means):
        assert said == [sentence.format(name) for name in ("bool", "uint16", "int64")]


def alone(rank):
    """A group that one rank creates, and the others do not."""

    def create():
        dist.new_group([1, 2, 3], timeout=timedelta(seconds=0.3))

    return told(create) if rank == 2 else ("", "")


def test_a_group_of_some_ranks_only_is_told(workers, tmp_path):
    """By numbers of the program. It named those in the group, and told to start more ranks."""
    said = ranks_of(workers, tmp_path, ranks=4)(alone)[2]
    assert said == (
        "UserError",
        "new_group: ranks 1, 3 did not create the group of ranks [1, 2, 3] within 0.3 s: all ranks "
        "create all groups, in one order, also those that they are not in",
    )


def others_call(rank):
    """One rank calls its group of howdah, the other one its group of gloo."""
    gloo = dist.new_group([0, 1], backend="gloo")
    short = dist.new_group([0, 1], timeout=timedelta(seconds=3))  # also of its meeting
    said = told(lambda: dist.all_reduce(torch.ones(1), group=short)) if rank == 0 else ("", "")
    dist.barrier(gloo)
    return said


def test_backends_that_wait_for_each_other_are_told(sharing):
    (kind, said), _ = sharing(others_call)
    assert kind == "PeerLost"
    assert "rank 1" in said
    assert "did not come before the deadline" in said
    assert "all_reduce(float32 [1], sum)" in said
    assert "test_backend_mistakes.py:" in said
    assert said.endswith("these are numbers in the group of ranks [0, 1]")


def mismatched(rank, case):
    """Calls of two ranks that do not belong together."""
    x = torch.ones(3 + (rank if case == "sizes" else 0))
    if case == "calls" and rank == 1:
        return told(dist.broadcast, x, 0)
    if case == "messages":
        return told(dist.send, x, 1) if rank == 0 else told(dist.recv, torch.ones(5), 0)
    if case == "queued":
        work = dist.all_reduce(x, async_op=True) if rank == 0 else None
        return told(work.wait if work else dist.barrier)
    return told(dist.all_reduce, x)


@pytest.mark.parametrize("case", ["calls", "sizes", "queued"])
def test_mismatched_calls_name_both_lines(ranks, case):
    began = monotonic()
    for kind, said in ranks(mismatched, case):
        assert kind == "Disagreement"
        assert said.count("/tests/") == 2, said  # of the files that called
        assert "all_reduce(float32 [3], sum)" in said
    assert monotonic() - began < 20  # gloo waits for 30 minutes, or adds what does not belong


def test_a_message_of_another_size_names_both_lines(sharing):
    _, (kind, said) = sharing(mismatched, "messages")
    assert kind == "Disagreement"
    assert "receives 20 bytes from rank 0" in said
    assert "which sent 12 at" in said
    assert said.count("/tests/") == 2, said  # of the files that called


def wrong(rank):
    """Calls with arguments that cannot be."""
    x = torch.ones(3)
    return [
        told(dist.all_reduce, torch.ones(3, device="meta")),
        told(dist.all_reduce, torch.eye(3).to_sparse()),
        told(dist.all_reduce, torch.ones(1).expand(3)),
        told(dist.all_gather, [torch.ones(3)], x),
        told(dist.all_gather_into_tensor, torch.ones(5), x),
        told(dist.all_to_all_single, torch.ones(3), x),
        told(dist.all_reduce, x, dist.ReduceOp.BAND),
    ]


def test_wrong_arguments_are_one_sentence(sharing):
    for found in sharing(wrong):
        assert [kind for kind, _ in found] == ["UserError"] * 7
        for (_, said), words in zip(found, WRONG, strict=True):
            assert words in said
            assert "\n" not in said


WRONG = [
    "all_reduce: a meta tensor has no elements to send",
    "all_reduce: a torch.sparse_coo tensor has no elements to send",
    "all_reduce: an expanded tensor cannot be written to",
    "all_gather: 1 tensors for 2 ranks",
    "all_gather: 2 ranks have 3 elements of torch.float32 each, and the whole tensor 5",
    "all_to_all: 3 rows cannot be cut for 2 ranks",
    "BAND combines the bits of integers, not of torch.float32",
]


def killed(rank, path, pipe):
    """A rank of a program that trains with DDP; rank 1 is killed in a step."""
    torch.set_num_threads(1)
    howdah.comm.backend.register()
    store = dist.FileStore(path, 2)
    dist.init_process_group("howdah", store=store, rank=rank, world_size=2)
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    loss = net(torch.ones(2, 4)).sum()
    if rank == 1:
        pipe.send(monotonic())
        os.kill(os.getpid(), signal.SIGKILL)
    pipe.send((told(loss.backward), monotonic()))


def test_a_killed_rank_is_told_by_name(tmp_path):
    context, pipes, children = multiprocessing.get_context("fork"), [], []
    for rank in range(2):
        mine, theirs = context.Pipe()
        child = context.Process(target=killed, args=(rank, str(tmp_path / "store"), theirs))
        child.start()
        pipes.append(mine)
        children.append(child)
    died, ((kind, said), seen) = pipes[1].recv(), pipes[0].recv()
    for child in children:
        child.join()
    assert kind in ("PeerLost", "RuntimeError")
    assert "rank 1 (process" in said
    assert "died" in said
    assert seen - died < 5  # 10 to 100 ms where there is a core; gloo takes its time-out
