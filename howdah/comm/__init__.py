"""Collective communication: groups that count every byte they send, over several transports.

A program that uses only the collectives needs one import: `from howdah.comm import connect`.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    """Imports `connect` on its first use."""
    if name == "connect":
        from howdah.comm.rendezvous import connect

        return connect
    raise AttributeError(f"module 'howdah.comm' has no attribute {name!r}")
