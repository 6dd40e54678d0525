"""The runtime: groups that count every byte, over transports.

`from howdah.comm import connect` is all that a program needs that uses the collectives alone.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    """`connect`, loaded when it is first asked for."""
    if name == "connect":
        from howdah.comm.rendezvous import connect

        return connect
    raise AttributeError(f"module 'howdah.comm' has no attribute {name!r}")
