"""Published runs that state a memory, as plans, or why such a row cannot be compared."""

from dataclasses import replace
from pathlib import Path

from howdah.plan.plan import Plan
from howdah.validation.plans import said
from howdah.validation.rows import Row, published_rows

FORMULA = "params+grads+optimizer"

__all__ = ["Row", "plan_of", "read"]


def read(path: Path) -> list[Row]:
    """The rows that state a memory."""
    return [row for row in published_rows(path) if row["mem_gb"]]


def plan_of(row: Row) -> Plan | str:
    """The row as a plan, or in a few words why its memory is not compared."""
    if reason := _unknown(row):
        return reason
    found = said(row)
    if isinstance(found, str):
        return found
    method = replace(found.plan.method, gradient_dtype="full")  # frameworks.py has their widths
    shape = found.plan.shape
    if FORMULA in row["mem_kind"]:  # of the blocks alone: the figure has no embedding and no head
        shape = replace(shape, vocab=found.plan.layout.tp, positions="alibi")
    return replace(found.plan, method=method, shape=shape)


def _unknown(row: Row) -> str:
    """What the row leaves open, or what no list of saved tensors has."""
    words = row.arguments
    for reason, applies in {
        "number of layers not published": not row["layers"],
        "number of devices not published": not row["gpu_count"],
        "stages given as a string, or cut by hand": not row["vpp"].isdigit()
        or "--decoder-first-pipeline-num-layers" in words,
        "local batch cut into micro-batches of unpublished size": "405B" in row["model"],
        "what fp8 keeps is not in the lists": row["precision"] == "fp8",
        "recompute chosen operator by operator": row["recompute"] == "selective"
        and row["framework"].startswith("torchtitan"),
        "buffers of Megatron-FSDP": "--use-megatron-fsdp" in words,
        "experts whose tokens are not counted": bool(words) and bool(row["moe_experts"]),
    }.items():
        if applies:
            return reason
    return ""
