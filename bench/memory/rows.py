"""Published runs as plans: what a row of runs.csv says, or why it cannot be said as a plan."""

import csv
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from howdah.base.errors import UserError
from howdah.plan.batch import Batch
from howdah.plan.layout import Layout
from howdah.plan.method import Method
from howdah.plan.plan import Plan, make_plan
from howdah.plan.stages import even, looped
from howdah.shapes.presets import preset
from howdah.shapes.shape import ModelShape
from howdah.shapes.weights import parts

GPT2_WORDS = 50257  # of GPT-2's tokenizer, which Megatron's functional tests use
PAD = 128  # Megatron pads the vocabulary to a multiple of this times tp


@dataclass(frozen=True)
class Row:
    """A published run. `number` gives a column's whole number, or what stands for an empty one."""

    columns: dict[str, str]

    def __getitem__(self, column: str) -> str:
        return self.columns[column]

    def number(self, column: str, empty: int = 1) -> int:
        return int(float(self[column])) if self[column] else empty

    @property
    def arguments(self) -> dict[str, Any]:
        """Those of Megatron's command line that the row quotes."""
        found: dict[str, Any] = json.loads(self["notes"].partition("args: ")[2] or "{}")
        return found


def read(path: Path) -> list[Row]:
    """The rows that state a memory."""
    with path.open(encoding="utf-8", newline="") as file:
        return [Row(columns) for columns in csv.DictReader(file) if columns["mem_gb"]]


def plan_of(row: Row) -> Plan | str:
    """The row as a plan, stages of equal numbers of blocks as all these frameworks cut them; or
    in a few words why there is none.
    """
    if reason := _unknown(row):
        return reason
    per_replica = row.number("tp") * row.number("pp") * row.number("cp")
    dp, micro = row.number("gpu_count") // per_replica, row.number("mbs")
    shape = _shape(row)
    layout = Layout(
        pp=row.number("pp"),
        dp=dp,
        cp=row.number("cp"),
        tp=row.number("tp"),
        ep=row.number("ep"),
        zero=row.number("zero"),
        sp=row["sp"] == "1" and row.number("tp") > 1,
        virtual=row.number("vpp"),
        micros=max(row.number("gbs") // (dp * micro), 1),
        recompute=row["recompute"],  # type: ignore[arg-type]
    )
    try:
        plan = make_plan(
            shape,
            layout,
            Batch(micro_batch=micro),
            sequence=row.number("seq"),
            method=Method(precision="bf16"),
        )
    except UserError as problem:
        return f"refused: {problem}"
    return replace(plan, stages=even(parts(shape), looped(layout.pp, layout.virtual)))


def _unknown(row: Row) -> str:
    """What the row leaves open, or what a plan cannot say."""
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


def _shape(row: Row) -> ModelShape:
    if row["model"].startswith("deepseekv2"):
        return replace(preset("deepseek-v2"), layers=row.number("layers"))
    gated, words = row["gated_ffn"] == "1", row.arguments
    vocab, step = row.number("vocab", GPT2_WORDS), PAD * row.number("tp")
    if row["framework"].startswith("Megatron"):
        vocab = -(-vocab // step) * step
    bloom = row["model"].startswith("BLOOM")
    return ModelShape(
        layers=row.number("layers"),
        width=row.number("hidden"),
        heads=row.number("heads"),
        kv_heads=row.number("kv_heads"),
        ffn_size=row.number("ffn"),
        vocab=vocab,
        context=row.number("seq"),
        feedforward="swiglu" if gated else "gelu",
        norm="rmsnorm" if gated else "layernorm",
        positions="rotary" if gated else "alibi" if bloom else "learned",
        bias=not gated and "--disable-bias-linear" not in words,
        tie_embeddings=not gated and "--untie-embeddings-and-output-weights" not in words,
        embedding_norm=bloom,
    )
