"""Times what a step on this machine consists of, on ranks that all work at the same time.

    product    a linear layer: forward, gradients of the input and of the weight
    pairs      attention: forward, backward
    copy       a tensor too large for the caches
    parts      embedding, block and head of a small model: forward, backward
    steps      whole steps of one
    group      an operation of a group, such as an all-reduce
    alone      whole steps of a small model on each rank
    together   the same on all ranks

A *round* times every operation once, each for the same seconds and behind a barrier: so it meets
the cores, caches and memory that the ranks of a run would leave it. With more ranks than cores a
repetition may take a moment, or all of another rank's slice of time, so a round counts the mean of
its repetitions. What disturbs the machine for a while disturbs a round; of several the median
counts.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from howdah.bench.collectives import loop, slowest
from howdah.comm.group import Group
from howdah.comm.transport import SingleRank, Transport
from howdah.model.attention import attend
from howdah.parallel.apply import ParallelModel, apply
from howdah.parallel.flat_params import DTYPES, random_init
from howdah.parallel.mesh import Mesh, connect_mesh
from howdah.parallel.stages import Given
from howdah.plan.plan import Plan
from howdah.shapes.weights import weights
from howdah.text.batches import Micro
from howdah.train.step import StepContext, to_device, train_step

CPU = torch.device("cpu")
MOST_CALLS = 2000  # of an operation of a group in a round
SHARED_STEPS = 3  # of a model that ranks share, in a round
PARTS = ("embedding", "block", "head")

Call = Callable[[], tuple[float, ...]]  # makes an operation once; the seconds of its phases
Seconds = dict[str, tuple[float, ...]]  # by operation, those of its phases


@dataclass(frozen=True)
class Round:
    """What the ranks time.

    threads   of torch in each rank
    seconds   for an operation
    dtype     torch's name of a precision
    products  (rows, inner, columns) of linear layers
    pairs     (rows, heads, tokens, size of a head) of attention
    copied    bytes of a copy
    parts     plans of models with one block, of which the parts are timed
    steps     plans of models, of which steps are timed
    groups    operations of the ranks' group, and bytes
    local     whether that is the group of the ranks on each machine
    alone     plans of models on one rank, of which steps are timed
    together  plans of such models on all ranks
    """

    threads: int
    seconds: float
    precision: str = "float32"
    products: Sequence[tuple[int, int, int]] = ()
    pairs: Sequence[tuple[int, int, int, int]] = ()
    copied: int = 0
    parts: Sequence[Plan] = ()
    steps: Sequence[Plan] = ()
    groups: Sequence[tuple[str, int]] = ()
    local: bool = False
    alone: Sequence[Plan] = ()
    together: Sequence[Plan] = ()


def name_of(kind: str, *sizes: object) -> str:
    """The name of an operation in what a round finds."""
    return " ".join([kind, *map(str, sizes)])


def take_round(transport: Transport, wanted: Round) -> Seconds:
    """The seconds of every operation, on average over the ranks. All ranks call together."""
    torch.set_num_threads(wanted.threads)
    found: Seconds = {}
    with ExitStack() as stack:
        for name, call in _calls(wanted, stack):
            transport.barrier()
            found[name] = _window(call, wanted.seconds)
    flat = torch.tensor([second for each in found.values() for second in each], dtype=torch.float64)
    if len(flat):
        transport.all_reduce(flat)
    rest = iter((flat / transport.size).tolist())
    alike = {name: tuple(next(rest) for _ in each) for name, each in found.items()}
    for operation, size in wanted.groups:
        name = name_of(operation, size)
        alike[name] = (_in_group(_meant(transport, wanted), operation, size, wanted.seconds),)
    for number, plan in enumerate(wanted.together):
        steps = run_steps(transport, plan, wanted.threads, SHARED_STEPS)
        alike[name_of("together", number)] = (sum(steps) / len(steps),)
    return alike


def _meant(transport: Transport, wanted: Round) -> Transport:
    """The transport of all ranks, or of those on this machine."""
    nodes = transport.among.wires.nodes
    if not wanted.local or not nodes:
        return transport
    here = [rank for rank, node in enumerate(nodes) if node == nodes[transport.rank]]
    return transport.among(here)


def _window(call: Call, seconds: float) -> tuple[float, ...]:
    """The mean of the repetitions in a window of time, of which there is at least one."""
    call()
    sums, count, began = [0.0], 0, perf_counter()
    while not count or perf_counter() - began < seconds:
        phases = call()
        sums = [a + b for a, b in zip(sums, phases, strict=True)] if count else [*phases]
        count += 1
    return tuple(one / count for one in sums)


def _calls(wanted: Round, stack: ExitStack) -> Iterator[tuple[str, Call]]:
    dtype = DTYPES[wanted.precision]  # type: ignore[index]
    for sizes in wanted.products:
        yield name_of("product", *sizes), _product(dtype, *sizes)
    for shape in wanted.pairs:
        yield name_of("pairs", *shape), _pairs(dtype, *shape)
    if wanted.copied:
        yield "copy", _copy(wanted.copied)
    for number, plan in enumerate(wanted.parts):
        for part, call in zip(PARTS, _parts(plan), strict=True):
            yield name_of(part, number), call
    for kind, plans in (("steps", wanted.steps), ("alone", wanted.alone)):
        for number, plan in enumerate(plans):
            mesh = stack.enter_context(connect_mesh(plan.layout, SingleRank(), CPU))
            yield name_of(kind, number), partial(_a_step, *_trained(plan, mesh))


# -- operators -----------------------------------------------------------------------


def _product(dtype: torch.dtype, rows: int, inner: int, columns: int) -> Call:
    x, gradient = torch.randn(rows, inner).to(dtype), torch.randn(rows, columns).to(dtype)
    weight = torch.nn.Parameter(torch.randn(columns, inner).to(dtype))
    if dtype != torch.float32:
        weight.grad_dtype = torch.float32
    weight.grad = torch.zeros(columns, inner)

    def call() -> tuple[float, ...]:
        began = perf_counter()
        out = F.linear(x, weight)
        forward = perf_counter()
        gradient @ weight.detach()
        inputs = perf_counter()
        torch.autograd.backward(out, gradient)
        return forward - began, inputs - forward, perf_counter() - inputs

    return call


def _pairs(dtype: torch.dtype, *sizes: int) -> Call:
    q, k, v, gradient = (torch.randn(sizes).to(dtype) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def call() -> tuple[float, ...]:
        for x in leaves:
            x.grad = None
        return _both(lambda: attend(q, k, v, None), gradient)

    return call


def _both(forward: Callable[[], Tensor], gradient: Tensor | None = None) -> tuple[float, ...]:
    began = perf_counter()
    out = forward()
    middle = perf_counter()
    torch.autograd.backward(out, gradient)
    return middle - began, perf_counter() - middle


def _copy(size: int) -> Call:
    to, source = (torch.ones(size, dtype=torch.uint8) for _ in range(2))

    def call() -> tuple[float, ...]:
        began = perf_counter()
        to.copy_(source)
        return (perf_counter() - began,)

    return call


# -- models --------------------------------------------------------------------------


def _parts(plan: Plan) -> list[Call]:
    """Forward and backward pass of a micro-batch through each part of a model of this rank alone,
    as the executor runs them.
    """
    with connect_mesh(plan.layout, SingleRank(), CPU) as mesh:
        context, (micro,) = _trained(plan, mesh)
    return _parts_of(context.placed, to_device(context, micro, step=0))


def _parts_of(placed: ParallelModel, given: Given) -> list[Call]:
    plan, model = placed.plan, placed.model
    rows, length = given.tokens.shape
    dtype = DTYPES[plan.method.precision]
    x, gradient = (torch.randn(rows, length, plan.shape.width).to(dtype) for _ in range(2))
    x.requires_grad_()
    context = model.context(x, given.positions, given.documents)

    def head() -> Tensor:
        total: float = given.tokens.numel()
        return placed.loss(model.final_norm(x), given.labels, total) / total

    def call(forward: Callable[[], Tensor], gradient: Tensor | None) -> tuple[float, ...]:
        x.grad = None
        return _both(forward, gradient)

    return [
        partial(call, lambda: model.embed(given.tokens, given.positions), gradient),
        partial(call, lambda: model.layers["0"](x, context), gradient),
        partial(call, head, None),
    ]


def micro_of(plan: Plan) -> Micro:
    """A micro-batch of tokens that are drawn at random; each row is one document."""
    rows, length = plan.micro_batch, plan.sequence
    tokens = np.random.default_rng(0).integers(0, plan.shape.vocab, (rows, length + 1))
    return Micro(
        tokens=tokens[:, :-1].copy(),
        labels=tokens[:, 1:].copy(),
        positions=np.tile(np.arange(length), (rows, 1)),
        documents=np.zeros((rows, length), np.int32),
        samples=np.arange(rows),
    )


def _trained(plan: Plan, mesh: Mesh) -> tuple[StepContext, list[Micro]]:
    """A model on this rank of its mesh, and the micro-batches of a step."""
    placed = apply(plan, mesh=mesh, fill=random_init(weights(plan.shape), 0))
    context = StepContext(placed, mesh, plan.method, 0)
    return context, [micro_of(plan) for _ in range(plan.micros)]


def _a_step(context: StepContext, micros: Sequence[Micro]) -> tuple[float, ...]:
    began = perf_counter()
    train_step(context, micros, step=1, rate=1e-4).told.values()  # waits, as a run does
    return (perf_counter() - began,)


def run_steps(transport: Transport, plan: Plan, threads: int, count: int) -> list[float]:
    """Seconds of `count` steps of a plan on all ranks together, behind one that is not timed. All
    ranks call together.
    """
    torch.set_num_threads(threads)
    with connect_mesh(plan.layout, transport, CPU) as mesh:
        trained = _trained(plan, mesh)
        _a_step(*trained)
        seconds = [second for _ in range(count) for second in _a_step(*trained)]
        trained[0].placed.sync_weights()
    return slowest(transport, seconds)


# -- groups --------------------------------------------------------------------------


def _in_group(transport: Transport, operation: str, size: int, seconds: float) -> float:
    """Seconds of an operation of a group, as the sums of gradients call it. An exchange is with the
    next rank and the one before.
    """
    through = Group(transport)
    x, out = (torch.zeros(-(-size // 4)) for _ in range(2))
    around = (through.rank + 1) % through.size, (through.rank - 1) % through.size

    def call() -> None:
        if operation == "exchange":
            through.exchange(out, x, *around, async_op=True).result()
        else:
            getattr(through, operation)(x, async_op=True).result()

    run = loop(transport, call, x)
    (once,) = slowest(transport, [run(1) + run(2)])
    calls = max(1, min(MOST_CALLS, int(3 * seconds / once)))
    (mean,) = slowest(transport, [run(calls) / calls])
    through.close()
    return mean


def medians(rounds: Sequence[Seconds]) -> tuple[Seconds, Mapping[str, float]]:
    """The medians over rounds; and by operation half the distance of the quartiles of its sum,
    relative to its median.
    """
    middle: Seconds = {}
    spread: dict[str, float] = {}
    for name in rounds[0]:
        table = np.array([one[name] for one in rounds])
        middle[name] = tuple(np.median(table, 0).tolist())
        low, half, high = np.quantile(table.sum(1), (0.25, 0.5, 0.75)).tolist()
        spread[name] = (high - low) / 2 / half
    return middle, spread
