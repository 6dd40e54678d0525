"""What members of a run say, as it is checked before it is believed: who has joined from another
machine knows the secret, and may be of another version, or broken.

    both     {"said": line}   {"failed": kind, "told": why}   {"trace": name, "text": …}
    server   {"addresses": {shard: [host, port]}, "feeds": …}
             {"done": shard}   {"unreached": shard}
             {"server": shard, "clocks": {"0": 12}, "gone": {"0": 4711}, …}      numbers, else;
             "ages": {"0": {"1": 12}}                       by worker, counts by number
    worker   {"step": 3, "loss": …, "tokens": …, "seconds": …, "waited": …, "queue": …}      numbers
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

Said = Mapping[str, Any]
BY_PLACE = ("clocks", "gone")  # of a server's report
REPORT = {"step", "loss", "tokens", "seconds", "waited", "queue"}  # of a worker, at least


def require_sound(
    role: str, said: Said, shards: int, held: Collection[int] = (), *, own: int = 0
) -> None:
    """Raises ValueError for what no sound server or worker of a run of so many shards says.

    held  the shards that a server has, of each of which it tells where it listens
    own   the one of them that it does not copy from another server
    """

    def is_shard(value: object) -> bool:
        return type(value) is int and 0 <= value < shards

    def are_places(value: object, of: Collection[int]) -> bool:
        known = isinstance(value, dict) and {*value} == {*map(str, of)}
        return known and all(map(_is_place, value.values()))  # type: ignore[attr-defined]

    checks: dict[str, Callable[[], bool]] = {
        "failed": lambda: _are_texts(said, "failed", "told"),
        "said": lambda: _are_texts(said, "said"),
        "addresses": lambda: (
            are_places(said["addresses"], held) and are_places(said.get("feeds"), {*held} - {own})
        ),
        "trace": lambda: _are_texts(said, "trace", "text"),
        "done": lambda: is_shard(said["done"]),
        "unreached": lambda: is_shard(said["unreached"]),
        "server": lambda: is_shard(said["server"]) and _is_report(said),
        "step": lambda: (
            {*said} >= REPORT
            and type(said["step"]) is int
            and said["step"] >= 0
            and all(map(_is_number, said.values()))
        ),
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


def _is_number(value: object) -> bool:
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 1 << 63)


def _are_by_number(value: object) -> bool:
    return isinstance(value, dict) and all(
        key.isdecimal() and type(count) is int for key, count in value.items()
    )


def _is_report(said: Said) -> bool:
    """Whether values are numbers; clocks and who has gone by place; ages by place and number."""
    ages = said.get("ages", {})
    return (
        isinstance(ages, dict)
        and all(place.isdecimal() and _are_by_number(of) for place, of in ages.items())
        and all(_are_by_number(said.get(name, {})) for name in BY_PLACE)
        and all(_is_number(said[name]) for name in said.keys() - {"ages", *BY_PLACE})
    )
