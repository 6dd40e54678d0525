"""A published run as a plan on a cluster, or in a few words why it cannot be said as one."""

import re
from dataclasses import dataclass, replace
from math import gcd

from howdah.base.errors import UserError
from howdah.machines.cluster import Cluster
from howdah.plan.batch import Batch, resolve_batch
from howdah.plan.check import check_plan
from howdah.plan.layout import Layout
from howdah.plan.method import Method, Routing
from howdah.plan.plan import Plan
from howdah.plan.stages import Stages, even, looped
from howdah.shapes.part import Part
from howdah.shapes.shape import ModelShape
from howdah.shapes.weights import parts
from howdah.sim.profile import profile_of
from howdah.validation.machines import cluster_of
from howdah.validation.models import shape_of
from howdah.validation.rows import Row
from howdah.validation.words import flash_of, framework_of, of_then, precision_of, recompute_of

# What rows leave open. NeMo's tables print up to ten virtual stages of a rank. Megatron-LM's own
# script for its table (examples/sc21/run_table_1.sh) takes two or three, and micro-batches of at
# most 16 and of the size that leaves each stage six or more.
MOST_STAGES = 10
MOST_MICRO = 16
LEAST_MICROS = 6
SEQUENCE = 2048
IDLE = (
    0.25  # with stages that wait longer than this, virtual stages are taken where none are stated
)
NODE = 8  # devices of a node


TIMES = ("iter_time_s", "tokens_s_gpu", "iter_time_s_derived")
# Reasons that are the row's own: it leaves open what a prediction needs.
UNSTATED = re.compile(r"not published|no time")


@dataclass(frozen=True)
class Answer:
    """A published run, said as a plan.

    framework  as the row spells it, with the release that its source names
    flash      whether attention runs in one kernel
    precision  fp32, fp16, bf16, fp8, mxfp8 or nvfp4: the plan's
    recompute  none, selective, operators (chosen one by one, as torchtitan does), full or unstated
    published  seconds of a step; 0 where the row states no time
    fewer      the same plan with one block less, where the row times one block alone
    notes      what the plan says differently from the row, or what the row left open
    """

    row: Row
    plan: Plan
    cluster: Cluster
    framework: str
    flash: bool
    precision: str
    recompute: str
    published: float
    notes: tuple[str, ...] = ()
    fewer: Plan | None = None


def answer(row: Row) -> Answer | str:
    """The row as a plan with its published time, or in a few words why there is none."""
    if not any(row.number(column) for column in TIMES):
        return "no time published"
    found = said(row)
    if isinstance(found, str):
        return found
    if "ONE transformer LAYER" in row["notes"]:
        found, less = (said(Row({**row.columns, "layers": count})) for count in ("2", "1"))
        if isinstance(found, str) or isinstance(less, str):
            return "time of one layer alone, on a layout that cuts the layers"
        found = replace(found, fewer=less.plan)
    return found if found.published else "no time published"


def said(row: Row) -> Answer | str:
    """The row as a plan, also one that states no time; or in a few words why there is none."""
    notes: list[str] = []
    shape = shape_of(row, notes)
    if isinstance(shape, str):
        return shape
    layout = _layout(row, shape, notes)
    if isinstance(layout, str):
        return layout
    recompute = recompute_of(row)
    batch = _batch(row, layout, notes)
    if isinstance(batch, str):
        return batch
    cluster = cluster_of(row, layout.world)
    if isinstance(cluster, str):
        return cluster
    try:
        plan = _plan(row, shape, layout, batch, notes)
    except UserError as problem:
        return f"refused: {problem}"
    return Answer(
        row,
        plan,
        cluster,
        framework=framework_of(row),
        flash=flash_of(row),
        precision=precision_of(row),
        recompute=recompute,
        published=_published(row, plan),
        notes=tuple(notes),
    )


# -- times ---------------------------------------------------------------------


def _published(row: Row, plan: Plan) -> float:
    """Seconds of a step; 0 where none are stated, or such as no step takes."""
    seconds = _stated(row, plan)
    return seconds if 1e-6 < seconds < 1e9 else 0.0


def _stated(row: Row, plan: Plan) -> float:
    if seconds := row.number("iter_time_s"):
        return seconds
    total = plan.batch.global_batch
    assert total is not None
    if rate := row.number("tokens_s_gpu"):
        return total * plan.sequence / (rate * (row.whole("gpu_count") or plan.layout.world))
    return row.number("iter_time_s_derived") or 0.0


# -- layout --------------------------------------------------------------------


def _layout(row: Row, shape: ModelShape, notes: list[str]) -> Layout | str:
    if not any(row[axis] for axis in ("dp", "tp", "pp", "zero")):
        return "layout not published"
    if not row["gpu_count"] and not row["dp"]:
        return "number of devices not published"
    tp, pp, cp = (max(row.whole(axis, 1), 1) for axis in ("tp", "pp", "cp"))
    replica = tp * pp * cp
    count = row.whole("gpu_count") or row.whole("dp") * replica
    if count < replica:
        return f"{count} devices do not divide into tp{tp} pp{pp} cp{cp}"
    if over := count % replica:
        notes.append(f"{count} devices do not divide into tp{tp} pp{pp} cp{cp}; {count - over} do")
    dp = count // replica
    if row.whole("dp", dp) not in (dp, dp * cp):
        notes.append(f"dp {row['dp']} does not make {count} devices; dp {dp} does")
    zero = _zero(row)
    virtual = _virtual(row, shape, pp, notes)
    recompute = {"full": "full", "selective": "selective", "operators": "selective"}
    again = recompute.get(recompute_of(row), "none")
    blocks = re.search(
        r"(\d+)\s*(?:layers|blocks)|(?:full|block|uniform):?\s*(\d+)", row["recompute"].lower()
    )
    some = int(blocks[1] or blocks[2]) if blocks and again == "full" else None
    if again == "full" and some is not None and some * pp * virtual >= shape.layers:
        some = None
    try:
        return Layout(
            pp=pp,
            dp=dp,
            cp=cp,
            tp=tp,
            ep=_ep(row, shape, dp * cp, notes),
            zero=zero,
            shard=_shard(row, zero, dp * cp),
            sp=tp > 1 and _divides_sequence(row),
            virtual=virtual,
            recompute=again,  # type: ignore[arg-type]
            recompute_blocks=some,
            # torch's pipelines gather a stage's weights once a step, and reduce its gradients once
            # (torch/distributed/pipelining/stage.py; torchtitan's parallelize_llama.py)
            accumulate="whole" if pp > 1 and zero > 1 else None,
            release="step" if pp > 1 and zero == 3 else "use",
        )
    except UserError as problem:
        return f"refused: {problem}"


def _divides_sequence(row: Row) -> bool:
    """Whether tp divides the sequence too: if not stated, on devices that are younger than that."""
    text = row["sp"].lower()
    return text in ("1", "true", "yes", "1.0") if text else not of_then(row)


def _zero(row: Row) -> int:
    text = row["zero"].lower()
    if match := re.search(r"[0-3]", text):
        return int(match[0])
    if re.search(r"grad_op", text):
        return 2
    if re.search(r"fsdp|hsdp|full.?shard|hybrid.?shard", text):
        return 3
    if "fsdp" in row["framework"].lower() and not text:
        return 3
    return 1 if re.search(r"dist|os", text) else 0


def _shard(row: Row, zero: int, replicas: int) -> int | None:
    """The group that shards one copy of the states, where the row says one."""
    match = re.search(r"(?:shard(?: group)?|hsdp)\s*[=: ]\s*(\d+)", row["notes"].lower())
    whole = row.whole("gpus_per_node", NODE) // max(row.whole("tp", 1), 1)
    hybrid = re.search(r"hsdp|hybrid", row["zero"].lower()) and whole > 1
    size = int(match[1]) if match else whole if hybrid else replicas
    return size if zero and 1 < size < replicas and replicas % size == 0 else None


def _ep(row: Row, shape: ModelShape, replicas: int, notes: list[str]) -> int:
    """Ranks of dp×cp that divide the experts; of others the most that do."""
    stated = max(row.whole("ep", 1), 1)
    if shape.experts is None or stated == 1:
        return 1
    ways = gcd(min(stated, shape.experts.count), replicas)
    if ways != stated:
        notes.append(f"experts over {ways} ranks in place of {stated}")
    return ways


def _virtual(row: Row, shape: ModelShape, pp: int, notes: list[str]) -> int:
    """Virtual stages of a rank; where they are not stated, by the framework's habit."""
    if pp == 1:
        return 1
    if stages := _letters(row):
        return max(len(stages) // pp, 1)
    if stated := row.whole("vpp"):
        return min(stated, max(shape.layers // pp, 1))
    ways = [v for v in range(2, MOST_STAGES + 1) if shape.layers // pp % v == 0]
    nemo = bool(re.search("nemo|bridge", row["framework"].lower())) and not row["vpp"]
    said = row["vpp"].startswith(">") or "interleaved" in row["notes"].lower()
    idle = not row["vpp"] and _idle(row, pp) > IDLE
    if not nemo and not said and not idle:
        return 1
    found = (max(ways) if nemo or (idle and not said) else min(ways)) if ways else 1
    found = 2 if row["vpp"].startswith(">") else found
    notes.append(f"virtual stages not published; {found} taken")
    return found


def _idle(row: Row, pp: int) -> float:
    """How long a stage waits without virtual stages, for each second that it computes."""
    rows = max(row.whole("gpu_count") // pp // max(row.whole("tp", 1) * row.whole("cp", 1), 1), 1)
    micros = row.whole("gbs") / rows / max(row.whole("mbs"), 1)
    return (pp - 1) / micros if micros else 0.0


def _letters(row: Row) -> list[str]:
    """The stages that Megatron's layout string spells: Et*3|(tt|)*6mL."""
    match = re.search(r"layout\s+(\S+)", row["vpp"])
    if match is None:
        return []
    text = re.sub(r"\(([^)]*)\)\*(\d+)", lambda one: one[1] * int(one[2]), match[1])
    text = re.sub(r"([A-Za-z])\*(\d+)", lambda one: one[1] * int(one[2]), text)
    return text.split("|")


# -- batch ---------------------------------------------------------------------


def _batch(row: Row, layout: Layout, notes: list[str]) -> Batch | str:
    """Any two of micro-batch, accumulation and global batch give the third."""
    dp = layout.readers
    total, micro, steps = (row.whole(one) for one in ("gbs", "mbs", "ga"))
    if total > 1 << 17 and (length := row.whole("seq")):
        total = max(round(total / length), 1)  # stated in tokens
    if not total and micro:
        total = micro * dp * max(steps, 1)
        if not steps:
            notes.append("accumulation not published; 1 taken")
    if not total:
        return "batch not published"
    if total < dp:
        return f"a global batch of {total} on {dp} replicas"
    share = -(-total // dp)
    if not micro and steps:
        micro = max(share // steps, 1)
    if not micro:
        micro = _tuned(share, layout.pp)
        notes.append(f"micro-batch not published; {micro} taken")
    if layout.pp > 1 and micro >= share and "torchtitan" in row["framework"].lower():
        micro = max(share // layout.pp, 1)  # its default: as many as there are ranks
        notes.append(f"the local batch is cut into micro-batches of {micro}")
    return Batch(global_batch=total, micro_batch=min(micro, share))


def _tuned(share: int, pp: int) -> int:
    """The largest power of two that leaves a pipeline six micro-batches for each stage."""
    least = 1 if pp == 1 else LEAST_MICROS * pp
    micro = 1
    while 2 * micro <= MOST_MICRO and share % (2 * micro) == 0 and share // (2 * micro) >= least:
        micro *= 2
    return micro


# -- the plan ------------------------------------------------------------------


def _plan(row: Row, shape: ModelShape, layout: Layout, batch: Batch, notes: list[str]) -> Plan:
    """Stages of equal numbers of blocks, as all these frameworks cut them, or as the row says."""
    precision = precision_of(row).replace("fp32", "float32")
    drops = re.search(r"token.?drop|capacity factor", row["notes"].lower())
    routing = Routing(capacity=1.0 if drops and shape.experts else 0.0)
    halves = profile_of(framework_of(row)).sums == 16 and precision != "float32"
    sent = "bf16" if halves else "full"
    method = Method(precision=precision, routing=routing, gradient_dtype=sent)  # type: ignore[arg-type]
    sequence = row.whole("seq") or SEQUENCE
    if not row["seq"]:
        notes.append(f"tokens of a sample not published; {sequence:,} taken")
    shape = replace(shape, context=max(shape.context, sequence))
    if problems := check_plan(shape, layout, batch, method, sequence=sequence):
        raise UserError("; ".join(problems))
    batch, layout = resolve_batch(batch, layout)
    stages = _stated_stages(row, shape, layout, notes)
    stages = stages or even(parts(shape), looped(layout.pp, layout.virtual))
    return Plan(shape, layout, batch, sequence, method, stages)


def _stated_stages(row: Row, shape: ModelShape, layout: Layout, notes: list[str]) -> Stages | None:
    """The stages of a layout string, or of a first and a last stage that Megatron is told."""
    where, letters = looped(layout.pp, layout.virtual), _letters(row)
    sizes = [stage.count("t") for stage in letters]
    if not letters and layout.virtual == 1:
        words = row.arguments
        ends = [words.get(f"--decoder-{one}-pipeline-num-layers") for one in ("first", "last")]
        ends = [one if isinstance(one, int) else None for one in ends]
        if any(ends) and layout.pp > 1:
            sizes = _between_ends(shape.layers, layout.pp, *ends)
    if len(sizes) != len(where) or sum(sizes) != shape.layers:
        if letters:
            notes.append(f"stages {row['vpp']} do not fit; cut evenly")
        return None
    if any("m" in stage for stage in letters):
        notes.append("the module that predicts a second token is left out")
    return _cut(tuple(parts(shape)), sizes, where)


def _between_ends(layers: int, pp: int, first: int | None, last: int | None) -> list[int]:
    inner = pp - (first is not None) - (last is not None)
    rest = layers - (first or 0) - (last or 0)
    middle = [rest // inner + (stage < rest % inner) for stage in range(inner)] if inner else []
    return [*([first] if first is not None else []), *middle, *([last] if last is not None else [])]


def _cut(every: tuple[Part, ...], sizes: list[int], where: tuple[int, ...]) -> Stages | None:
    """Embedding before the blocks of the first stage, head behind those of the last."""
    cut, at = [], 0
    for stage, size in enumerate(sizes):
        stop = at + size + (stage == 0)
        stop = len(every) if stage == len(sizes) - 1 else stop
        cut.append(every[at:stop])
        at = stop
    return Stages(tuple(cut), where) if all(cut) else None
