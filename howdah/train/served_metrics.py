"""What is observed of a run with servers: a row of metrics.jsonl, and values for TensorBoard."""

from collections import Counter
from collections.abc import Mapping
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
    servers  by shard, that of its server
    """
    tokens = sum(said["tokens"] for said in steps.values())
    stale: Counter[int] = Counter()
    for said in servers.values():
        stale.update({int(age): count for age, count in said.get("stale", {}).items()})
    ages = sum(age * count for age, count in stale.items())
    clocks = [said["step"] for said in steps.values()]
    busy = {place: said["seconds"] - said["waited"] for place, said in steps.items()}
    slowest = max(busy, key=busy.__getitem__)
    others = [seconds for place, seconds in busy.items() if place != slowest]
    return {
        "loss": sum(said["loss"] for said in steps.values()) / max(tokens, 1),
        "tps": sum(said["tokens"] / max(said["seconds"], 1e-9) for said in steps.values()),
        "stale": ages / max(stale.total(), 1),
        "oldest": max(stale, default=0),
        "staleness": {str(age): count for age, count in sorted(stale.items())},
        "apart": max(clocks) - min(clocks),
        "slowest": slowest,
        "slower": busy[slowest] / max(median(others), 1e-9) if others else 1.0,
        "queue": max(said["queue"] for said in steps.values()),
        "queued": max(said.get("queued", 0) for said in (*steps.values(), *servers.values())),
        "push_rate": sum(said.get("push_rate", 0.0) for said in servers.values()),
        "pull_rate": sum(said.get("pull_rate", 0.0) for said in servers.values()),
        "workers": [
            {"worker": place, **said, "stale": _age(place, servers)}
            for place, said in sorted(steps.items())
        ],
        "servers": [dict(said) for _, said in sorted(servers.items())],
    }


def _age(place: int, servers: Reports) -> float:
    """How old the weights of a worker's updates were, in versions: the mean."""

    def total(name: str) -> int:
        every = [item for said in servers.values() for item in said.get(name, {}).items()]
        return sum(count for one, count in every if int(one) == place)

    return total("ages") / max(total("updates"), 1)


def histograms_of(row: Mapping[str, Any]) -> dict[str, dict[int, int]]:
    """How often weights were how old, by TensorBoard key, since the start: on all servers, and on
    each.
    """
    found = {"served/staleness": row["staleness"]}
    for said in row["servers"]:
        if "stale" in said:
            found[f"served/server {said['server']} staleness"] = said["stale"]
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
