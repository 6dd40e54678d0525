"""Published runs as rows of a CSV: its columns, and numbers and words as publishers spell them."""

import csv
import json
import re
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from howdah.base.errors import UserError, named

NEEDED = (
    *("id", "source", "quality", "framework", "model", "layers", "hidden", "heads", "kv_heads"),
    *("ffn", "gated_ffn", "vocab", "seq", "moe_experts", "moe_topk", "moe_ffn", "gpu"),
    *("gpu_count", "gpus_per_node", "intra_link", "inter_link", "dp", "tp", "pp", "vpp", "cp"),
    *("ep", "zero", "sp", "recompute", "flash_attn", "mbs", "ga", "gbs", "precision"),
    *("iter_time_s", "tokens_s_gpu"),
)
MANY = {"": 1, "k": 1e3, "m": 1e6, "b": 1e9}
_NUMBER = re.compile(r"[~≈]?\s*([0-9][0-9,_]*(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)\s*([kmb]?)\b", re.I)


@dataclass(frozen=True)
class Row:
    """A published run, as its columns; a column that the file has not is empty."""

    columns: dict[str, str]

    def __getitem__(self, column: str) -> str:
        return self.columns.get(column, "")

    def number(self, column: str) -> float | None:
        """The number that begins a column (8, 8.0, 8,192, ~8, 4k); None where there is none."""
        match = _NUMBER.match(self[column])
        if match is None:
            return None
        found = float(re.sub("[,_]", "", match[1])) * MANY[match[2].lower()]
        return found if found < inf else None

    def whole(self, column: str, empty: int = 0) -> int:
        """The whole number that begins a column; `empty` where there is none."""
        found = self.number(column)
        return empty if found is None else round(found)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of Megatron's command line that the row quotes."""
        try:
            found = json.loads(self["notes"].partition("args: ")[2] or "{}")
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}


def published_rows(path: Path) -> list[Row]:
    """The runs of a CSV file. Raises UserError if it cannot be read or lacks a needed column."""
    try:
        with Path(path).open(encoding="utf-8-sig", newline="") as file:
            lines = csv.DictReader(file)
            missing = [name for name in NEEDED if name not in (lines.fieldnames or ())]
            if missing:
                raise UserError(
                    f"{named(path)} has no column {', '.join(missing)}; its first line names the "
                    "columns, and bench/planner/README.md says what each holds"
                )
            return [
                Row({name: (text or "").strip() for name, text in line.items() if name})
                for line in lines
            ]
    except OSError as error:
        raise UserError(
            f"cannot read {named(path)} ({error.strerror}); give a CSV of published runs"
        ) from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{named(path)} is no CSV in UTF-8 ({error}); save it as one") from None
