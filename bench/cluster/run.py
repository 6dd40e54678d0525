"""Runs a command on every host of a cluster in a box.

    python bench/cluster/run.py --profile flat-1g --hosts 4 -- COMMAND

In the words of COMMAND, {host} is the number of the host, {hosts} how many there are, {head} the
address of host 0, {address} its own; BOX_HOST, BOX_HOSTS, BOX_HEAD and BOX_ADDRESS are the same in
its environment. So torchrun runs on each:

    ... -- torchrun --nnodes {hosts} --node-rank {host} --master-addr {head} --nproc-per-node 1 ...

Each line of output is led by its host. Exit code: the first host's that is not 0; 2 for a mistake.
"""

import argparse
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from threading import Thread
from types import FrameType
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from box import Box, address
from profiles import PROFILES, profile_named

from howdah.base.errors import UserError


def filled(words: Sequence[str], host: int, hosts: int) -> list[str]:
    """A command's words with their placeholders filled."""
    facts = {"host": host, "hosts": hosts, "head": address(0), "address": address(host)}
    for name, value in facts.items():
        words = [word.replace(f"{{{name}}}", str(value)) for word in words]
    return [*words]


def on_all(box: Box, command: Sequence[str]) -> list[int]:
    """Runs the command on every host; their exit codes. What they print is led by their names."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    runs = [
        box.start(h, filled(command, h, box.hosts), stdin=subprocess.DEVNULL, **pipes)
        for h in range(box.hosts)
    ]
    tellers = [
        Thread(target=tell, args=(f"host{h}", pipe, to), daemon=True)
        for h, run in enumerate(runs)
        for pipe, to in ((run.stdout, sys.stdout), (run.stderr, sys.stderr))
    ]
    for teller in tellers:
        teller.start()
    codes = [run.wait() for run in runs]
    for teller in tellers:
        teller.join()
    return codes


def tell(name: str, pipe: IO[bytes], to: IO[str]) -> None:
    """Passes lines on."""
    for line in pipe:
        to.write(f"{name}: {line.decode(errors='replace')}")
        to.flush()


def main() -> int:
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words.add_argument("--profile", default="flat-1g", help=", ".join(PROFILES))
    words.add_argument("--hosts", type=int, default=2)
    words.add_argument("command", nargs="+", metavar="COMMAND")
    asked = words.parse_args()
    signal.signal(signal.SIGTERM, stop)
    try:
        with Box(profile_named(asked.profile, asked.hosts), asked.hosts) as box:
            codes = on_all(box, asked.command)
            for h in range(box.hosts):
                traffic = f"sent {box.sent(h):,} and received {box.received(h):,} bytes"
                print(f"host{h}: its card {traffic}", file=sys.stderr)
    except UserError as problem:
        print(f"cluster: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return next((code if code > 0 else 128 - code for code in codes if code), 0)


def stop(number: int, frame: FrameType | None) -> None:
    """Ends the box, and with it all that runs there."""
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
