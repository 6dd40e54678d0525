"""What of a shaped link a worker's pushes reach, and what more servers gain, on a cluster in a box.

    1 worker     pushes to one server, and waits until all is acknowledged; or pulls, too
    WORKERS      push and pull a step's bytes to and from k servers, under bsp: seconds of a step,
                 beside the bounds of `howdah/sim/servers.py`; and to such servers and one more on
                 each worker's host, with the shares of OSDI'20

Each worker and each of the k servers has a host and a link of its own. Nobody computes: a step ends
with the weights that contain all of its pushes. Headers count in the link's rate: TCP and IP take
4 %, and the acknowledgements of the other direction 2 %. All workers push in one order, as those do
that compute alike: a chunk's weights go back when the last of them has pushed it. At the ends of a
step one direction has nothing to do, for some 0.2 s whatever the size; so the size is not small.

Beside each stand bare sockets, in the same box: all workers and servers send each other the same
bytes at once, in both directions, without frames, sums, or waiting for each other. All processes
share the cores of one machine, so where bare sockets are far from the bound, the cores are, too.

Runs on a host of the box:   links.py serve NUMBER SHARES WORKERS   or
                             links.py work PLACE SHARES WORKERS STEPS PULLS   and the same as
                             links.py bare-serve …   and   links.py bare-work …
where SHARES are how much each server keeps, such as 6,3,3,3,3.
"""

import json
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from threading import Thread
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


def work(place: int, shares: Sequence[int], workers: int, steps: int, pulls: int) -> list[float]:
    """A worker; seconds of each step after the first. `pulls`: it does not only push."""
    addresses = [(f"host{number}", PORT) for number in range(len(shares))]
    client = ends.worker(addresses, SIZES, place=place, shares=shares, chunk=CHUNK)
    found = list[float]()
    for clock in range(steps + 1):
        client.clock, client.trades = clock, bool(pulls) and clock < steps
        began = perf_counter()
        for unit in UNITS:
            client.push(unit)
        if not pulls:
            client.drain()
        else:
            client.clock = clock + 1
            for handle in [client.pull(unit)[0] for unit in UNITS]:
                handle.result()
        found.append(perf_counter() - began)
    client.drain()
    client.close()
    return found[1:]


def bare_serve(number: int, shares: Sequence[int], workers: int, pulls: int) -> None:
    """Sends and receives the bytes of a server, again and again, until workers leave."""
    size = SIZE * shares[number] // sum(shares)
    with socket.create_server(("0.0.0.0", PORT)) as listener:
        socks = [listener.accept()[0] for _ in range(workers)]
        while _swap(socks, [size] * workers, [size * pulls] * workers):
            pass


def bare_work(
    place: int, shares: Sequence[int], workers: int, steps: int, pulls: int
) -> list[float]:
    """Seconds in which bare sockets carry a worker's bytes, after the first time."""
    socks, found = [_reach(f"host{number}") for number in range(len(shares))], list[float]()
    sizes = [SIZE * share // sum(shares) for share in shares]
    for _ in range(steps + 1):
        began = perf_counter()
        _swap(socks, [size * pulls for size in sizes], sizes)
        found.append(perf_counter() - began)
    return found[1:]


def _reach(host: str) -> socket.socket:
    """A connection to a server, which may not listen yet."""
    while True:
        with suppress(ConnectionRefusedError):
            return socket.create_connection((host, PORT))


def _swap(socks: Sequence[socket.socket], come: Sequence[int], go: Sequence[int]) -> bool:
    """Receives and sends so many bytes over each socket, all at once; a byte says that all came.
    Whether the other ends are still there.
    """
    block = bytes(1 << 18)

    def send(sock: socket.socket, left: int) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):
            while left > 0:
                left -= sock.send(block[:left])

    def receive(sock: socket.socket, left: int) -> None:
        buffer = bytearray(1 << 18)
        while left > 0 and (count := sock.recv_into(buffer, min(left, len(buffer)))):
            left -= count

    threads = [Thread(target=receive, args=each) for each in zip(socks, come, strict=True)]
    threads += [Thread(target=send, args=each) for each in zip(socks, go, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with suppress(BrokenPipeError, ConnectionResetError):
        for sock in socks:
            sock.send(b"1")
        return all(sock.recv(1) for sock in socks)
    return False


def measured(steps: int, *, few: bool = False) -> dict[str, dict[str, float]]:
    """By numbers of workers and servers, seconds of a step and of bare sockets, and the bounds of
    servers that are alone with what they serve, and of OSDI'20. Raises UserError where there is no
    box.

    few  the first two rows alone
    """
    found = {}
    cases = [(1, 1, [1], 0), (1, 1, [1], 1), *((WORKERS, k, [1] * k, 1) for k in SERVERS)]
    cases += [(WORKERS, k, best_shares(WORKERS, k), 1) for k in (0, *SERVERS) if k < WORKERS]
    for workers, servers, shares, pulls in cases[: 2 if few else None]:
        case = workers, servers, shares, (steps, pulls)
        step, bare = (max(median(one) for one in _steps(of, *case)) for of in ("", "bare-"))
        row = {"seconds": step, "bare": bare}
        row["osdi20"] = bound(workers, servers, size=SIZE, bandwidth=RATE)
        does = "that pushes and pulls" if pulls else "that pushes"
        name = f"{workers} workers, {servers} servers" if workers > 1 else f"1 worker {does}"
        if len(shares) > servers:
            name += ", and one on each worker's host"
        else:
            row["alone"] = alone(workers, servers, size=SIZE, bandwidth=RATE)
        found[name] = row
        print(f"{name}: {step:.3f} s, bare sockets {bare:.3f} s", flush=True)
    return found


def _steps(
    of: str, workers: int, servers: int, shares: Sequence[int], does: tuple[int, int]
) -> list[list[float]]:
    """Seconds of the steps of each worker of a box, whose first hosts are of servers alone.

    of    "bare-": with bare sockets
    does  how many steps, and whether it pulls
    """
    sys.path.append(str(Path(__file__).resolve().parents[1] / "cluster"))
    from box import Box
    from profiles import profile_named

    me, hosts = [sys.executable, str(Path(__file__).resolve())], servers + workers
    spelled = ",".join(map(str, shares))
    with Box(profile_named(PROFILE, hosts), hosts) as box:
        for number in range(len(shares)):
            given = [workers, does[1]] if of else [workers]
            box.start(number, [*me, f"{of}serve", number, spelled, *given])
        runs = [
            box.start(
                servers + place,
                [*me, f"{of}work", place, spelled, workers, *does],
                stdout=subprocess.PIPE,
                text=True,
            )
            for place in range(workers)
        ]
        return [json.loads(run.communicate()[0]) for run in runs]


if __name__ == "__main__":
    role, number, spelled, *numbers = sys.argv[1:]
    sizes = [*map(int, spelled.split(","))]
    roles = {"serve": serve, "work": work, "bare-serve": bare_serve, "bare-work": bare_work}
    if (found := roles[role](int(number), sizes, *map(int, numbers))) is not None:
        print(json.dumps(found))
