"""What members of a run say, as it is checked before it is believed: who has joined from another
machine knows the secret, and may be of another version, or broken.

    both     {"said": line}   {"failed": kind, "told": why}   {"trace": name, "text": …}
    server   {"addresses": {shard: [host, port]}, "feeds": …}
             {"done": shard}   {"unreached": shard}
             {"server": shard, "clocks": {"0": 12}, …}      numbers, and counts by number;
             "ages": {"0": {"1": 12}}                       by worker, counts by number
    worker   {"step": 3, "loss": …, "tokens": …, "seconds": …, "waited": …, "queue": …}
"""

from collections.abc import Callable, Mapping
from typing import Any

Said = Mapping[str, Any]
REPORT = {"step", "loss", "tokens", "seconds", "waited", "queue"}  # of a worker, at least


def require_sound(role: str, said: Said, shards: int) -> None:
    """Raises ValueError for what no sound server or worker of a run of so many shards says."""

    def is_shard(value: object) -> bool:
        return type(value) is int and 0 <= value < shards

    def are_places(value: object) -> bool:
        return isinstance(value, dict) and all(
            shard.isdecimal() and is_shard(int(shard)) and _is_place(at)
            for shard, at in value.items()
        )

    checks: dict[str, Callable[[], bool]] = {
        "failed": lambda: _are_texts(said, "failed", "told"),
        "said": lambda: _are_texts(said, "said"),
        "addresses": lambda: are_places(said["addresses"]) and are_places(said.get("feeds")),
        "trace": lambda: _are_texts(said, "trace", "text"),
        "done": lambda: is_shard(said["done"]),
        "unreached": lambda: is_shard(said["unreached"]),
        "server": lambda: is_shard(said["server"]) and _are_counts(said),
        "step": lambda: {*said} >= REPORT and _are_counts(said),
    }
    others = {"step"} if role == "server" else {"addresses", "done", "unreached", "server"}
    what = next((name for name in checks if name in said), "")
    if not what or what in others or not checks[what]():
        raise ValueError(f"a {role} does not say {str(said)[:200]}")


def _are_texts(said: Said, *names: str) -> bool:
    return all(isinstance(said.get(name), str) for name in names)


def _is_place(value: object) -> bool:
    match value:
        case [str(), int(port)]:
            return 0 <= port < 1 << 16
    return False


def _are_counts(said: Said) -> bool:
    """Whether all values are numbers, or counts by number; ages are these by number."""

    def are_by_number(value: object) -> bool:
        return isinstance(value, dict) and all(
            key.isdecimal() and type(count) is int for key, count in value.items()
        )

    ages = said.get("ages", {})
    return (
        isinstance(ages, dict)
        and all(place.isdecimal() and are_by_number(of) for place, of in ages.items())
        and all(
            isinstance(value, int | float) or are_by_number(value)
            for name, value in said.items()
            if name != "ages"
        )
    )
