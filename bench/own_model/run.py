"""Pictures per second of resnet18 under howdah.distribute, beside DDP and FSDP2, on two processes.

    python bench/own_model/run.py            writes results.md and results.json
    python bench/own_model/run.py --tiny     the same in a minute, writes nothing

Contestants take turns in the same processes, and each repeat begins with another, so speeds are
compared within a repeat. Losses have to agree, or nothing is written. Let nothing else run on the
machine: its noise is measured first (../quiet.py). README.md says what is compared with what.
"""

import argparse
import json
import sys
from pathlib import Path
from statistics import median
from time import perf_counter

sys.path.append(str(Path(__file__).resolve().parents[1]))

import quiet
import torch
import torch.distributed as dist
from contestants import CLASSES, Rows, contestants
from machine import machine

from howdah.comm.spawn import Workers
from howdah.comm.transport import Transport

HERE = Path(__file__).resolve().parent
RANKS, WARM_UP = 2, 1
SIZES = {False: (16, 64, 9, 3), True: (4, 32, 1, 1)}  # rows of a process, pixels, repeats, steps
GOALS = {  # who is no slower than whom
    "howdah dp2": "DDP",
    "howdah dp2 zero2": "FSDP2, gathered once",
    "howdah dp2 zero3": "FSDP2",
}
NEAR = 1e-3  # of a loss: what other orders of addition leave after the steps of a run


def rows(step: int, rank: int, count: int, pixels: int) -> Rows:
    """Made-up pictures of one process, whose brightness tells their class."""
    drawn = torch.Generator().manual_seed(step * RANKS + rank)
    labels = torch.randint(0, CLASSES, (count,), generator=drawn)
    noise = torch.randn(count, 3, pixels, pixels, generator=drawn)
    return noise + labels[:, None, None, None] / CLASSES, labels


def on_each(transport: Transport, port: int, *, tiny: bool = False) -> dict[str, list[list[float]]]:
    """By contestant, of each repeat: seconds of its steps, and the loss of each step."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=transport.rank, world_size=transport.size)
    count, pixels, repeats, steps = SIZES[tiny]
    every = contestants(transport)
    names, found = list(every), {name: list[list[float]]() for name in every}
    for repeat in range(WARM_UP + repeats):
        some = [rows(repeat * steps + n, transport.rank, count, pixels) for n in range(steps)]
        at = repeat % len(names)
        for name in names[at:] + names[:at]:
            dist.barrier()
            began = perf_counter()
            losses = [every[name](one) for one in some]
            found[name].append([perf_counter() - began, *losses])
    dist.destroy_process_group()
    return found


def on_each_tiny(transport: Transport, port: int) -> dict[str, list[list[float]]]:
    return on_each(transport, port, tiny=True)


def judged(ranks: list[dict[str, list[list[float]]]], pictures: int) -> dict[str, dict[str, float]]:
    """By contestant: pictures per second, its share of the bound, and the largest difference of a
    loss from DDP's; of a repeat, a contestant takes as long as its slower process.
    """
    seconds = {
        name: [
            max(turn[0] for turn in turns) for turns in zip(*(r[name] for r in ranks), strict=True)
        ]
        for name in ranks[0]
    }
    bound, found = seconds["bound"][WARM_UP:], dict[str, dict[str, float]]()
    for name, took in seconds.items():
        counted = took[WARM_UP:]
        share = median(b / t for b, t in zip(bound, counted, strict=True))
        pairs = zip(ranks[0][name], ranks[0]["DDP"], strict=True)
        apart = [abs(a - b) / b for x, y in pairs for a, b in zip(x[1:], y[1:], strict=True)]
        speed = pictures / median(counted)
        found[name] = {"pictures/s": speed, "of the bound": share, "loss": max(apart)}
    for name, other in GOALS.items():
        mine, theirs = seconds[name][WARM_UP:], seconds[other][WARM_UP:]
        ratio = median(b / a for a, b in zip(mine, theirs, strict=True))
        found[name] |= {"times": ratio}
    return found


def problems(found: dict[str, dict[str, float]]) -> list[str]:
    """Contestants whose losses are others; the bound exchanges nothing, and is one of them."""
    return [
        f"{name}: a loss differs from DDP's by {one['loss']:.1e} of its value (at most {NEAR:.0e})"
        for name, one in found.items()
        if name != "bound" and not one["loss"] <= NEAR
    ]


def table(about: str, found: dict[str, dict[str, float]]) -> str:
    lines = [f"# resnet18 on {RANKS} processes", "", about, ""]
    lines += ["| who | pictures/s | of the bound | times the peer |", "|---|---|---|---|"]
    for name, one in found.items():
        beside = f"{one['times']:.2f} ({GOALS[name]})" if "times" in one else ""
        lines.append(f"| {name} | {one['pictures/s']:.1f} | {one['of the bound']:.0%} | {beside} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="few pictures, to see that it works")
    quiet.add_option(parser)
    words = parser.parse_args()
    watch = quiet.Watch(writes=not words.tiny, loaded=words.loaded)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with Workers(RANKS, threads=1) as workers:
        ranks = workers.run(on_each_tiny if words.tiny else on_each, store.port)
    count, _, _, steps = SIZES[words.tiny]
    found, noise = judged(ranks, count * steps * RANKS), watch.end()
    text = table(f"{machine()} {quiet.sentence(noise)}", found)
    print(text)
    if wrong := problems(found):
        print("\n".join(wrong), file=sys.stderr)
        return 1
    if watch.writes:
        results = {"machine": machine(), "noise": noise, "found": found}
        (HERE / "results.md").write_text(text, encoding="utf-8")
        (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
