"""The same round trip by torch RPC, by gRPC, and by a bare socket: a vector comes, and one of the
same bytes goes.

Each server is a process of its own on this host, over 127.0.0.1, and adds what is pushed to its
vector, as the parameter server does. The bare socket is the limit: one thread at each end that does
nothing else, no frames, no checksums, one worker.
"""

import multiprocessing
import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from statistics import median
from time import perf_counter

import grpc
import torch
from torch.distributed import rpc

STATE: dict[str, torch.Tensor] = {}  # of a server's process
ENDLESS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


def timed(trip: Callable[[], object], times: int) -> float:
    """Median seconds of a round trip, after the first."""
    found = []
    for _ in range(times + 1):
        began = perf_counter()
        trip()
        found.append(perf_counter() - began)
    return median(found[1:])


# -- torch RPC -----------------------------------------------------------------------


def add_and_get(gradient: torch.Tensor) -> torch.Tensor:
    """On the server: adds, and returns the sum."""
    state = STATE.setdefault("weights", torch.zeros_like(gradient))
    return state.add_(gradient, alpha=1e-3)


def _rpc(name: str, rank: int, port: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    rpc.init_rpc(name, rank=rank, world_size=2)


def _rpc_server(port: int) -> None:
    torch.set_num_threads(1)
    _rpc("server", 0, port)
    rpc.shutdown()


def _rpc_worker(pipe: Connection, port: int, elements: int, times: int) -> None:
    torch.set_num_threads(1)
    _rpc("worker", 1, port)
    gradient = torch.ones(elements)
    pipe.send(timed(lambda: rpc.rpc_sync("server", add_and_get, (gradient,)), times))
    rpc.shutdown()


def torch_rpc(elements: int, times: int) -> float:
    """Seconds of a round trip of torch RPC."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    context, (ours, theirs) = multiprocessing.get_context("spawn"), multiprocessing.Pipe()
    server = context.Process(target=_rpc_server, args=(port,))
    worker = context.Process(target=_rpc_worker, args=(theirs, port, elements, times))
    for process in (server, worker):
        process.start()
    found: float = ours.recv()
    for process in (server, worker):
        process.join()
    return found


# -- gRPC ----------------------------------------------------------------------------


def _grpc_server(pipe: Connection) -> None:
    torch.set_num_threads(1)

    def answer(request: bytes, context: object) -> bytes:
        gradient = torch.frombuffer(bytearray(request), dtype=torch.float32)
        return add_and_get(gradient).numpy().tobytes()

    handler = grpc.method_handlers_generic_handler(
        "bench", {"push": grpc.unary_unary_rpc_method_handler(answer)}
    )
    server = grpc.server(ThreadPoolExecutor(2), options=ENDLESS)
    server.add_generic_rpc_handlers((handler,))
    pipe.send(server.add_insecure_port("127.0.0.1:0"))
    server.start()
    pipe.recv()
    server.stop(None).wait()


def by_grpc(elements: int, times: int) -> float:
    """Seconds of a round trip of gRPC, of raw bytes."""
    context, (ours, theirs) = multiprocessing.get_context("spawn"), multiprocessing.Pipe()
    server = context.Process(target=_grpc_server, args=(theirs,))
    server.start()
    with grpc.insecure_channel(f"127.0.0.1:{ours.recv()}", options=ENDLESS) as channel:
        push, gradient = channel.unary_unary("/bench/push"), torch.ones(elements)

        def trip() -> torch.Tensor:
            sent = push(gradient.numpy().tobytes())
            return torch.frombuffer(bytearray(sent), dtype=torch.float32)

        found = timed(trip, times)
    ours.send("end")
    server.join()
    return found


# -- a bare socket -------------------------------------------------------------------


def _bare_server(pipe: Connection, elements: int) -> None:
    torch.set_num_threads(1)
    gradient = torch.ones(elements)
    with socket.create_server(("127.0.0.1", 0)) as door:
        pipe.send(door.getsockname())
        sock, _ = door.accept()
    with sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while _filled(sock, gradient):
            sock.sendall(add_and_get(gradient).numpy().data.cast("B"))


def _filled(sock: socket.socket, vector: torch.Tensor) -> bool:
    """Receives a vector; whether one has come."""
    room = vector.numpy().data.cast("B")
    return sock.recv_into(room, room.nbytes, socket.MSG_WAITALL) == room.nbytes


def by_socket(elements: int, times: int) -> float:
    """Seconds of a round trip of a bare socket."""
    context, (ours, theirs) = multiprocessing.get_context("spawn"), multiprocessing.Pipe()
    server = context.Process(target=_bare_server, args=(theirs, elements))
    server.start()
    gradient, weights = torch.ones(elements), torch.zeros(elements)
    with socket.create_connection(ours.recv()) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def trip() -> None:
            sock.sendall(gradient.numpy().data.cast("B"))
            assert _filled(sock, weights)

        found = timed(trip, times)
    server.join()
    return found


PEERS = {"torch RPC": torch_rpc, "gRPC": by_grpc, "a bare socket": by_socket}
