"""What was found about predictions, as one table for programs."""

from collections.abc import Sequence
from statistics import mean
from typing import Any

from howdah.validation.judging import (
    Judged,
    Mode,
    by_source,
    mean_over_sources,
    refused,
    sweeps,
)


def summary(mode: Mode, judged: Sequence[Judged], beside: Sequence[Judged]) -> dict[str, Any]:
    """Errors by source beside those of the baseline, order inside sweeps, reasons, every row: what
    `howdah validate planner --json` prints.
    """
    other, ordered = by_source(beside), sweeps(judged)
    return {
        "mode": mode,
        "mean_over_sources": mean_over_sources(judged) if by_source(judged) else None,
        "baseline_mean_over_sources": mean_over_sources(beside),
        "sources": [
            {
                "source": source,
                "rows": len(errors),
                "error": mean(errors),
                "baseline_error": mean(other.get(source, [0.0])),
            }
            for source, errors in by_source(judged).items()
        ],
        "sweeps": {
            "count": len(ordered),
            "tau": mean(one.tau for one in ordered) if ordered else None,
            "regret_mean": mean(one.regret for one in ordered) if ordered else None,
            "regret_max": max((one.regret for one in ordered), default=None),
        },
        "without_prediction": [
            {"reason": reason, "rows": count, "scored": scored}
            for (reason, scored), count in refused(judged).most_common()
        ],
        "rows": [
            {
                "id": one.row["id"],
                "source": one.row["source"],
                "predicted": one.predicted or None,
                "published": one.published or None,
                "error": one.error,
                "calibrates": one.calibrates,
                "reason": one.reason or None,
                "notes": list(one.answer.notes) if one.answer else [],
            }
            for one in judged
        ],
    }
