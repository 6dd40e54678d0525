"""What the words of a published run mean: its precision, recomputation, framework and attention."""

import re

from howdah.validation.rows import Row


def precision_of(row: Row) -> str:
    """fp32, fp16, bf16, fp8, mxfp8 or nvfp4; bf16 where nothing is stated."""
    text = re.sub(r"[\s_]+", "", row["precision"].lower())
    both = "bf16" in text or "bfloat16" in text, re.search(r"(?<!b)f(p|loat)16|half", text)
    if re.search(r"fp4|nvfp4|float4", text):
        return "nvfp4"
    if re.search(r"mxfp8|fp8-?mx|mx-?fp8|fp8\(?mx", text):
        return "mxfp8"
    if re.search(r"fp8|float8|e4m3|8bit", text):
        return "fp8"
    if re.search(r"[VP]100|T4|2080", row["gpu"].upper()) or (both[1] and not both[0]):
        return "fp16"
    if both[0] or not re.search(r"fp32|float32|tf32|32bit", text):
        return "bf16"
    return "fp32"


def recompute_of(row: Row) -> str:
    """none, selective, operators, full or unstated."""
    text = row["recompute"].lower()
    if not text or "unstated" in text or "unknown" in text:
        return "unstated"
    if re.search(r"^(none|no|off|false|0|disabled)\b", text):
        return "none"
    if re.search(r"select|attention|attn|op\b|core|moe_act|layernorm|mla", text):
        return "operators" if "torchtitan" in row["framework"].lower() else "selective"
    return "full"


def framework_of(row: Row) -> str:
    """The framework with its release (25.09), where only the source names one, or the device says
    that it is none of the first.
    """
    release = re.search(r"(?<![\d.])2\d\.\d\d(?!\d)", row["source"])
    named = re.search(r"\d\.\d", row["framework"])
    if row["framework"].lower() == "megatron-lm" and not of_then(row):
        return f"{row['framework']} 2024"
    return f"{row['framework']} {release[0]}" if release and not named else row["framework"]


def flash_of(row: Row) -> bool:
    """Whether attention is one kernel; where that is not stated, by what was there: none for
    devices before A100, and none in the frameworks of before 2023.
    """
    text = row["flash_attn"].lower()
    if text:
        return text not in ("0", "0.0", "no", "false", "none")
    older = re.search(
        r"megatron-deepspeed|megatron-lm$|nemo-megatron|fairseq|metaseq|gpt-neox|alpa",
        row["framework"].lower(),
    )
    return not (older and of_then(row)) and not re.search(r"[VP]100|T4|2080", row["gpu"].upper())


def of_then(row: Row) -> bool:
    """Whether the device was there before flash attention was."""
    return bool(
        re.search(r"[VPA]100|T4|A40|A10|20[78]0|30[89]0|910A?$|MI250|TPU", row["gpu"].upper())
    )
