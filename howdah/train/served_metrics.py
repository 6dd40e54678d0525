"""What is observed of a run with servers: a row of metrics.jsonl, and values for TensorBoard."""

from collections import Counter
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

Reports = Mapping[int, Mapping[str, Any]]
COUNTS = ("pushes", "pulls", "repeated", "refused", "strangers", "missed")  # since the start
SLOWER = 1.5  # times the others' median, from which on a worker is called a straggler


def measured(steps: Reports, servers: Reports) -> dict[str, Any]:
    """What a row of metrics says of a moment of a run: loss and tokens per second of all workers'
    last steps, how old weights were in versions, how far workers are apart, who computes slowest
    and how many times as long as the others, what waits, and bytes per second of all servers.

    steps    by worker, its last report
    servers  by shard, that of its server; `ages`: by worker, how many of its updates were computed
             on weights that were so many versions old
    """
    tokens = sum(said["tokens"] for said in steps.values())
    stale = _ages(servers.values())
    clocks = [said["step"] for said in steps.values()]
    busy = {place: said["seconds"] - said["waited"] for place, said in steps.items()}
    slowest = max(busy, key=busy.__getitem__)
    others = [seconds for place, seconds in busy.items() if place != slowest]
    return {
        "loss": sum(said["loss"] for said in steps.values()) / max(tokens, 1),
        "tps": sum(said["tokens"] / max(said["seconds"], 1e-9) for said in steps.values()),
        "stale": _mean(stale),
        "oldest": max(stale, default=0),
        "staleness": _named(stale),
        "apart": max(clocks) - min(clocks),
        "slowest": slowest,
        "slower": busy[slowest] / max(median(others), 1e-9) if others else 1.0,
        "queue": max(said["queue"] for said in steps.values()),
        "queued": max(said.get("queued", 0) for said in (*steps.values(), *servers.values())),
        "push_rate": sum(said.get("push_rate", 0.0) for said in servers.values()),
        "pull_rate": sum(said.get("pull_rate", 0.0) for said in servers.values()),
        "workers": [
            {"worker": place, **said, "stale": _mean(ages), "staleness": _named(ages)}
            for place, said in sorted(steps.items())
            for ages in [_ages(servers.values(), place)]
        ],
        "servers": [
            {**said, "staleness": _named(_ages([said]))} for _, said in sorted(servers.items())
        ],
    }


def _ages(servers: Iterable[Mapping[str, Any]], place: int | None = None) -> Counter[int]:
    """How many updates of a worker, or of all, were computed on weights that were how old."""
    found: Counter[int] = Counter()
    for said in servers:
        for worker, ages in said.get("ages", {}).items():
            if place in (None, int(worker)):
                found.update({int(age): count for age, count in ages.items()})
    return found


def _mean(ages: Counter[int]) -> float:
    return sum(age * count for age, count in ages.items()) / max(ages.total(), 1)


def _named(ages: Counter[int]) -> dict[str, int]:
    """A histogram as JSON has it."""
    return {str(age): count for age, count in sorted(ages.items())}


def histograms_of(row: Mapping[str, Any]) -> dict[str, dict[int, int]]:
    """How often weights were how old, by TensorBoard key, since the start: of all updates, of those
    of each worker, and on each server.
    """
    found = {"served/staleness": row["staleness"]}
    for role in ("worker", "server"):
        for said in row[f"{role}s"]:
            found[f"served/{role} {said[role]} staleness"] = said["staleness"]
    return {key: {int(age): n for age, n in counts.items()} for key, counts in found.items()}


def scalars_of(row: Mapping[str, Any]) -> dict[str, float]:
    """The values of a row, by TensorBoard key."""
    rates, waits = ("push_rate", "pull_rate"), ("queue", "queued")
    names = ("tps", "stale", "oldest", "apart", "slower", *waits, *rates)
    found = {f"served/{name}": float(row[name]) for name in names}
    found["loss_metrics/global_avg_loss"] = float(row["loss"])
    for said in row["workers"]:
        of = f"served/worker {said['worker']}"
        seen = ("seconds", "waited", "stale", *waits, *rates)
        found |= {f"{of} {name}": float(said[name]) for name in seen if name in said}
    for said in row["servers"]:
        of = f"served/server {said['server']}"
        which = (*rates, "waiting", *waits, *COUNTS)
        found |= {f"{of} {name}": float(said[name]) for name in which if name in said}
    return found
