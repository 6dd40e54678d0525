"""What of a shaped link a worker's pushes reach, and what more servers gain, on a cluster in a box.

    1 worker     pushes to one server, and waits until all is acknowledged
    WORKERS      push and pull a step's bytes to and from k servers, under bsp: seconds of a step,
                 beside the bounds of `howdah/sim/servers.py`; and to such servers and one more on
                 each worker's host, with the shares of OSDI'20

Each worker and each of the k servers has a host and a link of its own. Nobody computes: a step ends
with the weights that contain all of its pushes. Headers count in the link's rate: TCP and IP take
4 %, and the acknowledgements of the other direction 2 %. All workers push in one order, as those do
that compute alike: a chunk's weights go back when the last of them has pushed it. At the ends of a
step one direction has nothing to do, for some 0.2 s whatever the size; so the size is not small.

Runs on a host of the box:   links.py serve NUMBER SHARES WORKERS   or
                             links.py work PLACE SHARES WORKERS STEPS
where SHARES are how much each server keeps, such as 6,3,3,3,3.
"""

import json
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter

import ends

from howdah.plan.method import Sync
from howdah.sim.servers import alone, best_shares, bound

PORT = 29500
PROFILE, RATE = "edge-100m", 100e6 / 8  # bytes/s of each link
SIZES = [1 << 17] * 64  # elements of 4 bytes: 32 MiB in all
SIZE, CHUNK = 4 * sum(SIZES), 1 << 17
WORKERS, SERVERS = 4, (1, 2, 4)
UNITS = [one.unit for one in ends.buffers(SIZES)]


def serve(number: int, shares: Sequence[int], workers: int) -> None:
    """One of some servers, until it is killed."""
    sync = Sync("bsp", workers=workers)
    with socket.create_server(("0.0.0.0", PORT)) as listener:
        host = ends.server(listener, SIZES, sync, of=(number, shares), chunk=CHUNK)
        while True:
            host.look(0.01)


def work(place: int, shares: Sequence[int], workers: int, steps: int) -> list[float]:
    """A worker; seconds of each step after the first. Alone, it only pushes."""
    addresses = [(f"host{number}", PORT) for number in range(len(shares))]
    client = ends.worker(addresses, SIZES, place=place, shares=shares, chunk=CHUNK)
    found = list[float]()
    for clock in range(steps + 1):
        client.clock, client.trades = clock, workers > 1 and clock < steps
        began = perf_counter()
        for unit in UNITS:
            client.push(unit)
        if workers == 1:
            client.drain()
        else:
            client.clock = clock + 1
            for handle in [client.pull(unit)[0] for unit in UNITS]:
                handle.result()
        found.append(perf_counter() - began)
    client.drain()
    client.close()
    return found[1:]


def measured(steps: int) -> dict[str, dict[str, float]]:
    """By numbers of workers and servers, seconds of a step, and the bounds of servers that are
    alone with what they serve, and of OSDI'20. Raises UserError where there is no box.
    """
    found = {}
    cases = [(1, 1, [1]), *((WORKERS, k, [1] * k) for k in SERVERS)]
    cases += [(WORKERS, k, best_shares(WORKERS, k)) for k in (0, *SERVERS) if k < WORKERS]
    for workers, servers, shares in cases:
        step = max(median(one) for one in _steps(workers, servers, shares, steps))
        least = bound(workers, servers, size=SIZE, bandwidth=RATE)
        name = f"{workers} workers, {servers} servers" if workers > 1 else "1 worker that pushes"
        if len(shares) > servers:
            found[f"{name}, and one on each worker's host"] = {"seconds": step, "osdi20": least}
            continue
        only = alone(workers, servers, size=SIZE, bandwidth=RATE)
        found[name] = {"seconds": step, "alone": only, "osdi20": least}
    return found


def _steps(workers: int, servers: int, shares: Sequence[int], steps: int) -> list[list[float]]:
    """Seconds of the steps of each worker of a box, whose first hosts are of servers alone."""
    sys.path.append(str(Path(__file__).resolve().parents[1] / "cluster"))
    from box import Box
    from profiles import profile_named

    me, hosts = [sys.executable, str(Path(__file__).resolve())], servers + workers
    spelled = ",".join(map(str, shares))
    with Box(profile_named(PROFILE, hosts), hosts) as box:
        for number in range(len(shares)):
            box.start(number, [*me, "serve", number, spelled, workers])
        runs = [
            box.start(
                servers + place,
                [*me, "work", place, spelled, workers, steps],
                stdout=subprocess.PIPE,
                text=True,
            )
            for place in range(workers)
        ]
        return [json.loads(run.communicate()[0]) for run in runs]


if __name__ == "__main__":
    role, number, spelled, *numbers = sys.argv[1:]
    sizes = [*map(int, spelled.split(","))]
    if role == "serve":
        serve(int(number), sizes, *map(int, numbers))
    else:
        print(json.dumps(work(int(number), sizes, *map(int, numbers))))
