"""A GPU that computes nothing: training steps of the real code at real sizes, without data.

torch lets Python name a device, here `card`. Its tensors are fakes: they have a shape, a dtype and
a device, and no elements, so a step of a model of 8 billion weights takes seconds on one core. What
would make a host wait for a GPU cannot be done with them, and is refused by name:

    a number is read        float(x), x.item(), bool(x), x.tolist(), torch.equal
    a size is asked for     x[mask], x.nonzero(), masked_select, unique
    a copy waits            x.cpu(); a copy from or to memory of the host that is not pinned

Operations on tensors of different devices are refused by torch. The other ranks are silent: their
part of every operation arrives at once, and has no elements either.

This names a device for the whole process: run it in a process of its own.
"""

import traceback
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode

import howdah
from howdah.comm import staging
from howdah.comm.group import Group
from howdah.comm.lane import CudaStreams, Lane
from howdah.comm.staging import Direct
from howdah.comm.transport import SingleRank, SubgroupFactory
from howdah.parallel import home_lanes
from howdah.parallel import homes as running
from howdah.parallel.apply import apply
from howdah.parallel.home_lanes import CardLane
from howdah.parallel.mesh import connect_mesh
from howdah.parallel.zero3 import ShardedWeights
from howdah.plan.batch import Batch
from howdah.plan.homes import homes
from howdah.plan.layout import parse_layout, resolve
from howdah.plan.plan import for_gpus, make_plan
from howdah.plan.recording import Wires
from howdah.text.batches import Micro
from howdah.train import feed, tell
from howdah.train.feed import Counts, feeder_of
from howdah.train.step import StepContext, train_step

CARD = "card"
SETUP = "_setup_privateuseone_for_python_backend"  # private, and not in every torch
PACKAGE = str(Path(howdah.__file__).parent)
aten = torch.ops.aten
READS = {  # what the host must know before it can go on, by operator
    aten._local_scalar_dense: "reads a number of the GPU",
    aten.is_nonzero: "reads a number of the GPU",
    aten.equal: "reads a number of the GPU",
    aten.nonzero: "asks the GPU for a size (nonzero)",
    aten.masked_select: "asks the GPU for a size (masked_select)",
    aten._unique2: "asks the GPU for a size (unique)",
    aten.unique_dim: "asks the GPU for a size (unique)",
    aten.unique_consecutive: "asks the GPU for a size (unique)",
}
MASKS = (aten.index, aten.index_put, aten.index_put_, aten._unsafe_index)  # by booleans: nonzero
COPIES = (aten._to_copy, aten.copy_, aten.copy)


class HostWaits(AssertionError):
    """The host would wait for the GPU inside a step."""


def there_is_one():
    """Whether this torch can name a device in Python."""
    return hasattr(backend_registration, SETUP)


def name_the_device():
    """Makes `card` a device of torch; once in a process."""
    if torch._C._get_privateuse1_backend_name() != CARD:
        getattr(backend_registration, SETUP)(CARD)


# -- what a host must not do -----------------------------------------------------------


class NoWaiting(TorchDispatchMode):
    """Refuses every operator that makes the host wait for the card."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kind, tensors = func.overloadpacket, list(tensors_of((args, kwargs)))
        if any(x.device.type == CARD for x in tensors):
            if kind in READS:
                raise HostWaits(f"{site()} {READS[kind]}: {func}")
            if kind in MASKS and any(x.dtype == torch.bool for x in tensors_of(args[1])):
                raise HostWaits(f"{site()} asks the GPU for a size (index by a mask): {func}")
        if kind in COPIES:
            self.check_copy(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def check_copy(self, func, args, kwargs):
        """A copy between host and card must be of pinned memory, and must say that it waits not."""
        if func.overloadpacket is aten._to_copy:
            source, target = args[0], kwargs.get("device") or args[0].device
            host = source if torch.device(target).type == CARD else None
            places = {source.device.type, torch.device(target).type}
        else:
            target, source = args[0], args[1]
            host = source if target.device.type == CARD else target
            places = {source.device.type, target.device.type}
        if len(places) == 1:
            return
        waits = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
        if waits or not getattr(host, "pinned_here", False):
            raise HostWaits(f"{site()} copies {' and '.join(sorted(places))} and waits: {func}")


def tensors_of(arguments):
    """All tensors in nested arguments of an operator."""
    if isinstance(arguments, torch.Tensor):
        yield arguments
    elif isinstance(arguments, dict):
        yield from tensors_of([*arguments.values()])
    elif isinstance(arguments, list | tuple):
        for one in arguments:
            yield from tensors_of(one)


def site():
    """The innermost function of howdah that is being run."""
    ours = [one for one in traceback.extract_stack() if one.filename.startswith(PACKAGE)]
    return f"{Path(ours[-1].filename).relative_to(PACKAGE)}:{ours[-1].name}" if ours else "a test"


# -- what is there beside the card -----------------------------------------------------


class FakeStream:
    """A stream, and an event: everything has ended."""

    def record(self, stream=None):
        pass

    wait_event = wait_stream = record

    def query(self):
        return True

    def synchronize(self):
        raise HostWaits(f"{site()} waits for an event")

    def elapsed_time(self, _):
        return 0.0


class Awaited(FakeStream):
    """A stream or an event for which a host waits, as homes do."""

    def synchronize(self):
        pass


class AtOnce:
    """A thread whose work is done where it is given to it: fakes belong to one thread."""

    def __init__(self, *_, **__):
        pass

    def submit(self, work):
        done = Future()
        done.set_result(work())
        return done

    def shutdown(self, **_):
        pass


class Unlocked:
    """Locks of memory: nothing is locked, and all counts as if it were."""

    def lock(self, x):
        return x

    def has(self, x):
        return True

    def close(self):
        pass


ONLY = FakeStream()


class SilentRanks(SingleRank):
    """Ranks that send nothing: what they would write has no elements anyway."""

    def __init__(self, rank, size):
        self.rank, self.size, self.among = rank, size, SilentGroups(rank)
        self._lane = Lane(CudaStreams(torch.device(CARD)))

    def lane_of(self, x):
        return self._lane if x.device.type == CARD else None

    def nothing(self, *_, **__):
        return 0

    all_reduce = reduce_scatter = all_gather = broadcast = all_to_all = send = receive = nothing


class SilentGroups(SubgroupFactory):
    """Groups of silent ranks."""

    wires = Wires()

    def __init__(self, rank):
        self.rank = rank

    def __call__(self, ranks):
        return SilentRanks(list(ranks).index(self.rank), len(ranks))


def pin(x):
    """A tensor that counts as pinned."""
    fake = torch.empty(x.shape, dtype=x.dtype)
    fake.pinned_here = True
    return fake


@contextmanager
def silent():
    """Streams without a GPU, and what hosts tell each other: every rank says what this one says."""
    replaced = [
        (CudaStreams, "current", lambda self: ONLY),
        (CudaStreams, "new", lambda self: ONLY),
        (CudaStreams, "inside", lambda self, stream: nullcontext()),
        (CudaStreams, "event", lambda self: FakeStream()),
        (feed, "pinned", pin),
        (tell, "pinned_like", pin),
        (Group, "sum_scalars", lambda self, values: [self.size * float(x) for x in values]),
        (ShardedWeights, "_ask_others", lambda self, unit: None),
        (staging, "is_let_go", lambda x: False),  # a fake has no memory
        (Direct, "give", lambda self, x, taken, rows=None: None),
    ]
    with ExitStack() as stack:
        for where, name, new in replaced:
            stack.enter_context(patch.object(where, name, new))
        yield


@contextmanager
def awaited():
    """The host waits for homes. A norm is 1, what is asked is true, and no token comes twice."""
    waits = Awaited()
    replaced = [
        (CudaStreams, "current", lambda self: waits),
        (CudaStreams, "new", lambda self: waits),
        (CudaStreams, "event", lambda self: waits),
        (running, "Locks", Unlocked),
        (running, "ThreadPoolExecutor", AtOnce),
        (home_lanes, "ThreadPoolExecutor", AtOnce),
        (CardLane, "here", lambda self, x: torch.zeros(x.shape, dtype=x.dtype)),
        (torch.Tensor, "item", lambda self: 1.0),
        (torch.Tensor, "__bool__", lambda self: True),
        (torch.Tensor, "unique", lambda self, **_: (self, torch.zeros_like(self))),
    ]
    with ExitStack() as stack:
        for where, name, new in replaced:
            stack.enter_context(patch.object(where, name, new))
        yield


@contextmanager
def fake_card():
    """Inside, the device `card` is a GPU without elements. Nothing is refused yet."""
    name_the_device()
    threads = torch.autograd.is_multithreading_enabled()
    torch.autograd.set_multithreading_enabled(False)  # modes belong to a thread
    try:
        with silent(), FakeTensorMode(allow_non_fake_inputs=True):
            yield torch.device(CARD, 0)
    finally:
        torch.autograd.set_multithreading_enabled(threads)


# -- steps -----------------------------------------------------------------------------


def micro_of(shape, *, rows, length, documents=2):
    """A micro-batch whose rows hold some documents of equal length."""
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, shape.vocab, (rows, length + 1))
    at = np.arange(length)
    number = np.tile(at * documents // length, (rows, 1)).astype(np.int32)
    positions = np.tile(at % -(-length // documents), (rows, 1))
    samples = np.arange(rows)
    return Micro(tokens[:, :-1].copy(), tokens[:, 1:].copy(), positions, number, samples)


def train_on_card(shape, words, method, rank=0, rows=1, length=16, documents=2):  # noqa: PLR0917
    """Trains two steps as one rank of a layout. Returns the devices of all tensors that last.

    Raises HostWaits when the host would wait for the card inside a step.
    """
    layout = resolve(parse_layout(words), None)
    plan = make_plan(shape, layout, Batch(micro_batch=rows), sequence=length, method=method)
    micros = [micro_of(shape, rows=rows, length=length, documents=documents)] * plan.micros
    away = homes(plan.layout) != {"device"}
    with fake_card() as device, awaited() if away else nullcontext():
        plan = for_gpus(plan)
        mesh = connect_mesh(plan.layout, SilentRanks(rank, plan.layout.world), device)
        placed = apply(plan, mesh=mesh, fill=lambda piece, out: None)
        context, feeder = StepContext(placed, mesh, method, seed=1), feeder_of(device)
        with nullcontext() if away else NoWaiting():
            for step in range(2):  # the first pass of zero3 gathers otherwise than the second
                batch = replace(feeder(micros), counts=Counts(1000.0, False))
                result = train_step(context, batch, step=step, rate=1e-3)
        mesh.close()
    assert (result.tokens, result.stop) == (1000, False)
    assert result.told._keep is batch  # whose memory a copy would fill again
    states = [x for state in placed.optimizer.state.values() for x in state.values()]
    if placed.homes:
        states += [x for state in placed.homes.states.values() for x in state.values()]
    flats = [x for unit in placed.units.values() for x in (unit.weights, unit.masters, unit.summed)]
    return sorted({x.device.type for x in (*states, *flats)})
