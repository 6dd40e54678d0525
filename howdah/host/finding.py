"""What `howdah doctor` prints: findings, and sizes in words."""

from dataclasses import dataclass

MIB, GIB = 2**20, 2**30


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    lack  what is missing, what that means for a run and what to do; None if nothing is missing
    """

    name: str
    value: str
    lack: str | None = None


def in_words(size: int) -> str:
    """A number of bytes as text, such as 23.5 GiB or 64.0 MiB."""
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / MIB:.1f} MiB"
