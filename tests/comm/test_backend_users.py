"""What programs do with the torch backend: DDP, FSDP2, DTensor, compiled functions, checkpoints.

Each runs on two ranks with howdah and with gloo. The sum of two terms has one order: equal bits.
"""

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch_ranks import ranks_of, told

from howdah.comm.torch_backend.fsdp2 import Gathers, share_buffers


@pytest.fixture
def beside_gloo(workers, tmp_path):
    """Runs a function with howdah and with gloo; the results of both, by rank."""

    def run(function, *arguments):
        return [ranks_of(workers, tmp_path, name)(function, *arguments) for name in NAMES]

    return run


NAMES = ("howdah", "gloo")


def net():
    """Layers with a buffer, for DDP to broadcast."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))


def batch(rank, step):
    torch.manual_seed(100 * rank + step)
    return torch.randn(5, 6)


def bits(tensors):
    """Tensors as numbers of Python, which are equal if their bits are."""
    return [x.detach().reshape(-1).view(torch.uint8).tolist() for x in tensors]


def trained(model, rank, steps=3):
    """Trains some steps; the weights."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(steps):
        loss = model(batch(rank, step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())


def with_ddp(rank, options):
    model = DistributedDataParallel(net(), bucket_cap_mb=1e-4, **options)
    return bits(trained(model, rank)), bits(model.buffers())


@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_as_bucket_view": True, "static_graph": True}, {"find_unused_parameters": True}],
    ids=lambda options: "-".join(options) or "plain",
)
def test_ddp(beside_gloo, options):
    ours, theirs = beside_gloo(with_ddp, options)
    assert ours == theirs
    assert ours[0][0] == ours[1][0]


def with_no_sync(rank):
    """Gradients of two batches are added before they are reduced, as torch's own tests do."""
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        with model.no_sync():
            model(batch(rank, step)).square().mean().backward()
        model(batch(rank, step + 10)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return bits(model.parameters())


def test_ddp_that_adds_gradients_of_batches(beside_gloo):
    ours, theirs = beside_gloo(with_no_sync)
    assert ours == theirs
    assert ours[0] == ours[1]


def with_hooks(rank):
    """DDP with hooks that compress."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    model = DistributedDataParallel(net())
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    found = bits(trained(model, rank))
    model = DistributedDataParallel(net())
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return found + bits(trained(model, rank))


def test_hooks_of_ddp(beside_gloo):
    ours, theirs = beside_gloo(with_hooks)
    assert ours == theirs


def with_fsdp2(rank, options):
    """Fully sharded: each Linear a unit, and the root."""
    model, options = net(), {**options}
    factor, shared = options.pop("factor", None), options.pop("shared", False)
    for layer in (model[0], model[3]):
        fully_shard(layer, **options)
    fully_shard(model, **options)
    if shared:
        assert share_buffers(model) == 3
    if factor:
        model.set_gradient_divide_factor(factor)
    weights = [x.full_tensor() for x in trained(model, rank)]
    return bits(weights)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("reshard", [True, False])
def test_fsdp2(beside_gloo, reshard):
    ours, theirs = beside_gloo(with_fsdp2, {"reshard_after_forward": reshard})
    assert ours == theirs
    assert ours[0] == ours[1]


def test_fsdp2_with_a_divide_factor(workers, tmp_path):
    """PREMUL_SUM, which gloo refuses: a factor of 2 is the mean of two ranks."""
    run = ranks_of(workers, tmp_path)
    assert run(with_fsdp2, {"factor": 2.0}) == run(with_fsdp2, {})


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("reshard", [True, False])
def test_fsdp2_in_shared_buffers(beside_gloo, workers, tmp_path, reshard):
    options = {"reshard_after_forward": reshard}
    ours = ranks_of(workers, tmp_path)(with_fsdp2, {**options, "shared": True})
    assert ours == ranks_of(workers, tmp_path, "gloo")(with_fsdp2, options)
    assert ours == ranks_of(workers, tmp_path, "howdah_tcp")(
        with_fsdp2, {**options, "shared": True}
    )


def shared_wrongly(rank):
    """Calls of share_buffers that cannot be."""
    model = fully_shard(nn.Linear(4, 4))
    own = [dist.new_group([r]) for r in range(2)][rank]
    found = [
        told(share_buffers, nn.Linear(2, 2)),
        told(share_buffers, model, dist.ProcessGroup(rank, 2)),
        told(lambda: share_buffers(model, buffers=2)),
    ]
    share_buffers(model, own)
    found.append(told(model, torch.ones(2, 4)))
    gathers = Gathers(dist.group.WORLD)
    lent = [gathers.allocate((8,), dtype=torch.bfloat16, device="cpu") for _ in range(2)]
    found.append(told(lambda: gathers.allocate((8,), dtype=torch.bfloat16, device="cpu")))
    del lent
    return found


def test_shared_buffers_refuse_in_one_sentence(workers, tmp_path):
    words = [
        "no module was given to fully_shard before",
        "the group is not of howdah",
        "buffers is 2: at least 3",
        "a unit is sharded over another group",
        "more all-gathers of one size are in use at once",
    ]
    for found in ranks_of(workers, tmp_path)(shared_wrongly):
        assert [kind for kind, _ in found] == ["UserError"] * len(words)
        for (_, said), expected in zip(found, words, strict=True):
            assert expected in said


def with_dtensor(rank):
    """Each change of placement, and a matrix product of shards."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(3)
    a, b = torch.randn(5, 6), torch.randn(6, 4)
    rows = distribute_tensor(a, mesh, [Shard(0)])
    columns = rows.redistribute(mesh, [Shard(1)])
    product = columns @ distribute_tensor(b, mesh, [Shard(0)])
    whole = product.redistribute(mesh, [Replicate()])
    scattered = product.redistribute(mesh, [Shard(1)])
    own = DTensor.from_local(torch.full((2,), float(rank)), mesh, [Shard(0)])
    made = [rows.to_local(), columns.to_local(), whole.to_local(), scattered.to_local()]
    return bits([*made, own.full_tensor(), own.sum().full_tensor()])


def test_dtensor(beside_gloo):
    ours, theirs = beside_gloo(with_dtensor)
    assert ours == theirs


def with_functional(rank):
    group, x = dist.group.WORLD, torch.arange(4.0) + rank
    made = [
        functional.all_reduce(x, "sum", group),
        functional.all_reduce(x, "avg", group),
        functional.all_gather_tensor(x, 0, group),
        functional.reduce_scatter_tensor(x, "sum", 0, group),
        functional.all_to_all_single(x, [2, 2], [2, 2], group),
        functional.broadcast(x, 1, group),
        *functional.all_reduce_coalesced([x, x + 1], "sum", group),
        *functional.all_gather_into_tensor_coalesced([x, x + 1], group),
        *functional.reduce_scatter_tensor_coalesced([x, x + 1], "sum", [0, 0], group),
    ]
    with dist._coalescing_manager(group, torch.device("cpu"), async_ops=True) as work:
        dist.all_reduce(one := x.clone())
        dist.all_reduce(two := x + 1)
    work.wait()
    return bits([one.wait() if hasattr(one, "wait") else one for one in [*made, one, two]])


def test_functional_collectives(workers, tmp_path):
    x, y = torch.arange(4.0), torch.arange(4.0) + 1
    both = torch.cat([x, y])
    for rank, found in enumerate(ranks_of(workers, tmp_path)(with_functional)):
        own = slice(2 * rank, 2 * rank + 2)
        expected = [x + y, (x + y) / 2, both, (x + y)[own], torch.cat([x[own], y[own]]), y]
        expected += [x + y, x + y + 2, both, both + 1, (x + y)[own], (x + y + 2)[own]]
        expected += [x + y, x + y + 2]
        assert found == bits(expected)


def with_checkpoint(rank, folder):
    """Saves shards and loads them into another model."""
    model = net()
    fully_shard(model)
    trained(model, rank, steps=1)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    other = net()
    fully_shard(other)
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    other.load_state_dict(state["model"])
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return all(a.full_tensor().equal(b.full_tensor()) for a, b in pairs)


def test_distributed_checkpoints(workers, tmp_path):
    assert ranks_of(workers, tmp_path)(with_checkpoint, str(tmp_path / "saved")) == [True, True]


def with_compile(rank):
    """A compiled function with a collective in it."""
    group = dist.group.WORLD

    @torch.compile(backend="aot_eager", fullgraph=True)
    def mean(x):
        return functional.all_reduce(x * 2, "sum", group) / 2

    return mean(torch.arange(3.0) + rank).tolist()


@pytest.mark.slow
def test_compiled_collectives(workers, tmp_path):
    assert ranks_of(workers, tmp_path)(with_compile) == [[1.0, 3.0, 5.0]] * 2


def with_compiled_ddp(rank):
    """A compiled DDP; and calls at which a compiled function breaks in two."""

    @torch.compile(backend="aot_eager")
    def heard(x):
        work = dist.all_reduce(y := x * 2, async_op=True)
        work.wait()
        dist.barrier()
        works = [dist.isend(y + rank, 1 - rank), dist.irecv(z := torch.empty_like(y), 1 - rank)]
        [work.wait() for work in works]
        return y + z

    model = DistributedDataParallel(net())
    return bits([*trained(torch.compile(model, backend="aot_eager"), rank), heard(torch.ones(3))])


@pytest.mark.slow
def test_compiled_ddp(beside_gloo):
    """DDP's reducer calls the group between steps: its methods were compiled, and the program ended
    at the first attribute of theirs.
    """
    ours, theirs = beside_gloo(with_compiled_ddp)
    assert ours == theirs


def with_mesh(rank):
    """Groups along both axes of a mesh, and their ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found = []
    for name in ("dp", "tp"):
        group = mesh.get_group(name)
        dist.all_reduce(x := torch.tensor([float(rank)]), group=group)
        found.append((dist.get_backend(group), x.item()))
    return found


def test_meshes_of_groups(workers, tmp_path):
    found = ranks_of(workers, tmp_path, ranks=4)(with_mesh)
    sums = [(2.0, 1.0), (4.0, 1.0), (2.0, 5.0), (4.0, 5.0)]
    assert found == [[("howdah", dp), ("howdah", tp)] for dp, tp in sums]


ENDS_AT_ONCE = """
import threading, time
from howdah.comm.torch_backend.work import Lane

taken, go = threading.Event(), threading.Event()

def job():
    taken.set()
    go.wait()

work = Lane("lane", lambda site: None).later(job, [])
taken.wait()
work.get_future().then(lambda _: time.sleep(0.3))  # in C++, on the thread of the lane
go.set()
work.wait()
"""


@pytest.mark.slow
def test_a_program_ends_while_a_callback_runs():
    """Without destroy_process_group; gloo aborts then, now and then."""
    ended = subprocess.run(
        [sys.executable, "-c", ENDS_AT_ONCE], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")
