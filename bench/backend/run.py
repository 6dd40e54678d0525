"""How fast are torch's own programs on howdah's backend, beside gloo?

    python bench/backend/run.py          two ranks; results.md, results.json
    python bench/backend/run.py --tiny   one small round of each, writes nothing

README.md says what is compared with what. Both backends have groups of the same two processes, and
take turns, step by step, with the same step of a model alone; the Trainer has programs of its own,
which take turns too.
"""

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import quiet
import torch
import torch.distributed as dist
from machine import machine
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import howdah.comm.backend  # noqa: F401  registers it
from howdah.comm.torch_backend.fsdp2 import share_buffers

HERE = Path(__file__).resolve().parent
TRAINER = HERE / "trainer_steps.py"
RANKS, LAYERS, BATCH = 2, 8, 4
GOALS = {"fsdp2 shared": 2.5}  # times gloo
BOUND, OTHERS = 1.5, 1.0  # of all others, where gloo is communication-bound, and where it is not
ALONE = "alone"  # the same step where nothing is exchanged
Step = Callable[[], list[torch.Tensor]]  # what it makes, to compare bits
Cases = dict[str, dict[str, Step]]  # by name and backend


def net(width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(LAYERS)])


def forward_backward(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    model(x).square().mean().backward()
    grads = [weight.grad for weight in model.parameters()]
    return [getattr(g, "to_local", lambda g=g: g)().clone() for g in grads if g is not None]


def with_fsdp2(group: Any, width: int, x: torch.Tensor, *, shared: bool) -> Step:
    mesh, model = DeviceMesh.from_group(group, "cpu"), net(width)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if shared:
        share_buffers(model, group)
    return lambda: forward_backward(model, x)


def with_ddp(group: Any, width: int, x: torch.Tensor) -> Step:
    model = DistributedDataParallel(net(width), process_group=group)
    return lambda: forward_backward(model, x)


def factors(width: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(width // 4, width), torch.randn(width, width)


def with_dtensor(group: Any, width: int) -> Step:
    """A product whose sum is scattered, and its rows turned to columns."""
    mesh, (a, b) = DeviceMesh.from_group(group, "cpu"), factors(width)
    left, right = distribute_tensor(a, mesh, [Shard(1)]), distribute_tensor(b, mesh, [Shard(0)])

    def step() -> list[torch.Tensor]:
        rows = (left @ right).redistribute(mesh, [Shard(0)])
        return [rows.redistribute(mesh, [Shard(1)]).to_local()]

    return step


def with_all_reduce(group: Any, length: int) -> Step:
    x = torch.ones(length)

    def step() -> list[torch.Tensor]:
        x.fill_(1.0)  # its owner writes it before every call
        dist.all_reduce(x, group=group)
        return [x]

    return step


def alone(width: int, x: torch.Tensor) -> dict[str, Step]:
    """What a rank computes in a step, without any group: a model's, and a product's."""
    model, (a, b) = net(width), factors(width)
    left, right = (one.contiguous() for one in (a[:, : width // RANKS], b[: width // RANKS]))
    return {"model": lambda: forward_backward(model, x), "product": lambda: [left @ right]}


def cases(width: int) -> Cases:
    """The steps of both backends, which have groups in this process, and those of a rank alone."""
    groups = {name: dist.new_group(backend=name) for name in ("howdah", "gloo")}
    torch.manual_seed(dist.get_rank())
    x = torch.randn(BATCH, width)
    found: Cases = {"fsdp2 shared": {}, "fsdp2": {}, "ddp": {}, "dtensor": {}}
    for name, group in groups.items():
        found["fsdp2 shared"][name] = with_fsdp2(group, width, x, shared=name == "howdah")
        found["fsdp2"][name] = with_fsdp2(group, width, x, shared=False)
        found["ddp"][name] = with_ddp(group, width, x)
        found["dtensor"][name] = with_dtensor(group, width)
        for length in (2, 1 << 14, width * width // 4):
            found.setdefault(f"all_reduce {4 * length} B", {})[name] = with_all_reduce(
                group, length
            )
    plain = alone(width, x)
    for name in ("fsdp2 shared", "fsdp2", "ddp"):
        found[name][ALONE] = plain["model"]
    found["dtensor"][ALONE] = plain["product"]
    return found


def in_turn(names: list[str], turn: int) -> list[str]:
    """The names, each round beginning with another one."""
    at = turn % len(names)
    return names[at:] + names[:at]


def by_turns(steps: dict[str, Step], rounds: int) -> dict[str, Any]:
    """Seconds of each backend's steps, which take turns, and by how much their results differ."""
    made = {backend: step() for backend, step in steps.items()}  # once each: a warm-up too
    pairs = [*zip(made["howdah"], made["gloo"], strict=True)]
    equal = torch.tensor(int(all(torch.equal(a, b) for a, b in pairs)))
    dist.all_reduce(equal, dist.ReduceOp.MIN)
    apart = torch.stack([(a - b).abs().max() / b.abs().max() for a, b in pairs]).max()
    dist.all_reduce(apart, dist.ReduceOp.MAX)
    seconds: dict[str, list[float]] = {backend: [] for backend in steps}
    for turn in range(rounds):
        for backend in in_turn([*steps], turn):
            dist.barrier()
            began = perf_counter()
            steps[backend]()
            seconds[backend].append(perf_counter() - began)
    return {"seconds": seconds, "equal": bool(equal), "apart": apart.item()}


def rank_of(rank: int, path: str, width: int, rounds: int, pipe: Any) -> None:
    """One rank; rank 0 sends seconds by case and backend, and whether bits are equal."""
    torch.set_num_threads(1)
    store = dist.FileStore(path, RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    told = {name: by_turns(steps, rounds) for name, steps in cases(width).items()}
    if rank == 0:
        pipe.send(told)
    dist.destroy_process_group()


def measured(width: int, rounds: int) -> dict[str, Any]:
    """All cases on new processes."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        mine, theirs = context.Pipe()
        place = str(Path(folder) / "store"), width, rounds, theirs
        ranks = [context.Process(target=rank_of, args=(rank, *place)) for rank in range(RANKS)]
        for one in ranks:
            one.start()
        theirs.close()
        try:
            told: dict[str, Any] = mine.recv()
        finally:
            for one in ranks:
                one.join()
    return told


def trainers(steps: int, rounds: int) -> dict[str, Any]:
    """The Trainer of transformers, by programs that take turns."""
    seconds: dict[str, list[float]] = {"howdah": [], "gloo": [], ALONE: []}
    losses = set()
    for turn in range(rounds):
        for backend in in_turn([*seconds], turn):
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command += [f"--nproc-per-node={RANKS}", str(TRAINER), backend, str(steps)]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, env=environment, capture_output=True, check=True)
            lines = done.stdout.splitlines()  # the Trainer prints lines of its own
            took, loss = json.loads(next(line for line in lines if line.startswith(b"[")))
            seconds[backend].append(took)
            losses |= {loss} if backend != ALONE else set()
    apart = max(losses) - min(losses)
    return {"seconds": seconds, "equal": not apart, "apart": apart}


def summary(told: dict[str, Any], goals: dict[str, float]) -> dict[str, Any]:
    """Medians, their spread (the quartiles), and gloo's median over howdah's.

    The bound is the same step alone, or what the link takes for the bytes (`link`) if that is more.
    gloo is communication-bound where its step takes twice as long as the same step alone, or more.
    """
    rows = {}
    for name, one in told.items():
        row: dict[str, Any] = {"equal": one["equal"], "apart": one["apart"]}
        for backend, seconds in one["seconds"].items():
            low, _, high = quantiles(seconds, n=4) if len(seconds) > 1 else seconds * 3
            row[backend] = {"median": median(seconds), "quartiles": [low, high]}
        gloo, ours = row["gloo"]["median"], row["howdah"]["median"]
        row["times"] = gloo / ours
        computing = row[ALONE]["median"] if ALONE in row else 0.0
        row["bound"] = max(computing, one.get("link", 0.0))
        row["goal"] = goals.get(name, BOUND if gloo >= 2 * computing else OTHERS)
        rows[name] = row
    return rows


def table(rows: dict[str, Any]) -> str:
    lines = [
        "| case | gloo, ms | howdah, ms | bound, ms | times gloo | at most | goal | | equal bits |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        cells = [
            f"{1e3 * row[key]['median']:.3g} ({1e3 * low:.3g} to {1e3 * high:.3g})"
            for key in ("gloo", "howdah")
            for low, high in [row[key]["quartiles"]]
        ]
        least = row["bound"]
        cells.append(f"{1e3 * least:.3g}")
        most = f"{row['gloo']['median'] / least:.2f}" if least else ""
        met = "met" if row["times"] >= row["goal"] else "**missed**"
        equal = "yes" if row["equal"] else f"**no**: {row['apart']:.0e} apart"
        said = f"{row['times']:.2f} | {most} | {row['goal']:.1f} | {met} | {equal}"
        lines.append(f"| {name} | {' | '.join(cells)} | {said} |")
    return "\n".join(lines)


def main() -> int:
    """Measures, and writes what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="small, and writes nothing")
    quiet.add_option(parser)
    options = parser.parse_args()
    watch = quiet.Watch(writes=not options.tiny, loaded=options.loaded)
    width, rounds = (64, 3) if options.tiny else (1024, 40)
    told = measured(width, rounds)
    told["trainer"] = trainers(*((2, 1) if options.tiny else (50, 5)))
    rows, looks = summary(told, GOALS), watch.end()
    print(table(rows))
    if not options.tiny:
        kept = {"machine": machine(), "noise": looks, "width": width, "rows": rows}
        (HERE / "results.json").write_text(json.dumps(kept, indent=1) + "\n")
        said = f"# The torch backend beside gloo\n\n{quiet.sentence(looks)}\n\n{table(rows)}\n"
        (HERE / "results.md").write_text(said)
    return 0


if __name__ == "__main__":
    sys.exit(main())
