"""What each framework keeps, with the source where there is one.

Not all of it was known beforehand. Some settings were chosen among several after their errors on
these same rows were seen; `TRIED` has the others, and run.py prints their errors beside. So small
errors of those sources say that the parts can be explained, not how the next run is predicted.

Two constants belong to the way of measuring, not to a framework: nvidia-smi also sees the CUDA
context, and both it and torch's "reserved" see the gaps of the caching allocator.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from rows import Row

from howdah.plan.plan import Plan
from howdah.plan.sharding import local_buffers, own_range
from howdah.shapes.activations import CLASSIC, FLASH
from howdah.shapes.kept import Kernels, Kind
from howdah.sim.memory import BOTH, Width, memory, peak

GIB = 2**30
MATRIX = 2  # dims
CONTEXT = 1.3 * GIB  # of 1.1 to 1.6 that nvidia-smi shows before the first tensor
RESERVED = 1.065  # reserved over allocated, as runs that publish both have it
WORKSPACES = 0.1 * GIB  # of 0.1 to 0.2: cuBLAS and Transformer Engine, held throughout. The lower
# edge was taken after the states of Megatron's tests were seen to lie some 0.05 to 0.13 GiB higher.

HALF: Kind = "compute"
TWO_COPIES = (("logits", HALF), ("logits in float32", "float32"))
# Compiled as one graph, the cross entropy cannot work in place and makes another whole copy; so
# says the comment in megatron/core/fusions/fused_cross_entropy.py of a later version. It was looked
# for because these rows came out 0.39 GiB too low.
THREE_COPIES: tuple[tuple[str, Kind], ...] = (*TWO_COPIES, ("compiled copy", "float32"))
# Inferred from SimuMax's rows themselves: of 10, 6 and 4 bytes for a logit, 4 fits. No source.
# What torch's cross entropy of float32 logits has at its backward pass: the logarithms, their
# gradient, and that of the logits; torchtitan's loop deletes the logits themselves before.
IN_TORCH: tuple[tuple[str, Kind], ...] = (
    ("logarithms", "float32"),
    ("their gradient", "float32"),
    ("gradient of logits", "float32"),
)
IN_PLACE = (("logits", HALF), ("their copy", HALF))


@dataclass(frozen=True)
class Framework:
    """Settings of one source.

    kernels     what its operations keep
    width       bytes of an element of each component; None is 2, 4, 4 and Adam's 8
    workspaces  bytes that libraries hold throughout
    step        bytes for each element of a rank's share of gradients that the step makes one piece,
                which no piece that the allocator keeps has room for
    bucket      elements of the buffer in which gradients are collected, in 16 bits
    dummies     keeps a 16-bit buffer for each shape of matrix, in the place of gradients that are
                added inside the product (get_dummy_wgrad of Transformer Engine, called by
                megatron/core/tensor_parallel/layers.py)
    """

    kernels: Kernels
    width: Width | None = None
    workspaces: float = WORKSPACES
    step: int = 0
    bucket: int = 0
    dummies: bool = False


# fp16 gradients; https://arxiv.org/abs/1910.02054, section 3.1. The rows say "fp16/bf16"; float32
# gradients are closer on average, but 25 % too high on two stages (r1836), so both are incomplete.
# Its step flattens a rank's share of gradients, in 16 bits and then in float32
# (deepspeed/runtime/zero/stage_1_and_2.py, step); reduce_bucket_size is 500 million by default.
DEEPSPEED = Framework(
    Kernels(TWO_COPIES, flash=False, dropout=True),
    Width(2, 4, 2, 8, gathered=2, reduced=2),
    step=6,
    bucket=500_000_000,
)
# float32 shards, gathered and multiplied in 16 bits: the run table's "fp32 params, bf16 compute"
TORCHTITAN = Framework(replace(FLASH, logits=IN_TORCH), Width(4, 0, 4, 8, gathered=2, reduced=4))
# 18 bytes per parameter and the paper's lists, written down by formula: no workspaces. The figure
# leaves out embedding and head, a plan does not.
KORTHIKANTI = Framework(CLASSIC, workspaces=0)
SIMUMAX = Framework(replace(FLASH, logits=IN_PLACE), dummies=True)


def framework_of(row: Row) -> Framework:
    """The settings of the row's source."""
    if row["framework"].startswith("torchtitan"):
        return TORCHTITAN
    if row["framework"] == "Megatron-DeepSpeed":
        return DEEPSPEED
    if row["framework"] == "Megatron-LM":
        return KORTHIKANTI
    return SIMUMAX if row["source"].startswith("SimuMax") else _megatron_core(row)


def _megatron_core(row: Row) -> Framework:
    """Megatron's functional tests; dropout of 0.1 is its default."""
    words = row.arguments
    matrices = words.get("--attention-backend") == "unfused"
    local = words["--transformer-impl"] == "local"
    logits = THREE_COPIES if "--cross-entropy-loss-fusion" in words else TWO_COPIES
    return Framework(Kernels(logits, flash=not (matrices or local), dropout=True))


def _two_copies(one: Framework) -> Framework:
    return replace(one, kernels=replace(one.kernels, logits=TWO_COPIES))


# Other settings whose errors were looked at, by the beginning of their source's name.
TRIED: tuple[tuple[str, str, Callable[[Framework], Framework]], ...] = (
    ("torchtitan", "10 bytes a logit", lambda one: replace(one, kernels=FLASH)),
    ("BLOOM", "no pieces of the step", lambda one: replace(one, step=0, bucket=0)),
    ("bigscience", "no pieces of the step", lambda one: replace(one, step=0, bucket=0)),
    ("SimuMax", "10 bytes a logit, no dummies or workspaces", lambda _: Framework(FLASH, None, 0)),
    ("SimuMax", "6 bytes a logit", _two_copies),
    ("SimuMax", "no dummies", lambda one: replace(one, dummies=False)),
    ("BLOOM", "float32 gradients", lambda one: replace(one, width=None)),
    ("bigscience", "float32 gradients", lambda one: replace(one, width=None)),
    ("Megatron-LM functional", "no workspaces", lambda one: replace(one, workspaces=0)),
    ("Megatron-LM functional", "two copies of logits everywhere", _two_copies),
)


def predict(row: Row, plan: Plan, framework: Framework) -> float:
    """Bytes in the way that the row counts them: of its last rank, or of the worst stage."""
    kind = row["mem_kind"]
    per_stage = plan.layout.world // plan.layout.pp
    ranks = [stage * per_stage for stage in range(plan.layout.pp)]
    if "LAST rank" in kind:
        ranks = [plan.layout.world - 1]
    most = max(_allocated(framework, plan, rank) for rank in ranks)
    if "nvidia-smi" in kind:
        return most * RESERVED + CONTEXT
    return most * RESERVED if "peak reserved" in kind else most


def predict_states(row: Row, plan: Plan) -> float:
    """Bytes of weights, gradients and the optimizer's, of the rank that the row states."""
    rank = plan.layout.world - 1 if "LAST rank" in row["mem_kind"] else 0
    framework = framework_of(row)
    held = memory(plan, rank, framework.kernels, framework.width)
    return framework.workspaces + sum(one.bytes for one in held if one.moments == BOTH)


def _allocated(framework: Framework, plan: Plan, rank: int) -> float:
    held = peak(memory(plan, rank, framework.kernels, framework.width)) + framework.workspaces
    return held + _pieces(framework, plan, rank) + framework.dummies * _dummies(plan, rank)


def _pieces(framework: Framework, plan: Plan, rank: int) -> int:
    """Bytes of a share of gradients as one piece, and of the buffer that collects them."""
    buffers = local_buffers(plan, rank)
    own = sum(b - a for a, b in (own_range(one, plan.layout, rank) for one in buffers))
    collected = min(framework.bucket, sum(one.length for one in buffers))
    return framework.step * own + 2 * collected * (plan.layout.zero > 0)


def _dummies(plan: Plan, rank: int) -> int:
    """Every matrix of a block has a shape of its own, blocks have equal ones, and the head one."""
    elements = {
        buffer.unit: sum(s.box.elements for s in buffer.segments if len(s.shape) == MATRIX)
        for buffer in local_buffers(plan, rank)
        if not buffer.unit.endswith(".experts")
    }
    blocks = [count for unit, count in elements.items() if unit.startswith("layers.")]
    return 2 * (max(blocks, default=0) + elements.get("head", 0))
