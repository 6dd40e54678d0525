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
from time import perf_counter

sys.path.append(str(Path(__file__).resolve().parents[1]))

import quiet
import torch
import torch.distributed as dist
from contestants import CLASSES, Rows, contestants
from judge import judged, problems, report
from machine import machine

from howdah.comm.spawn import Workers
from howdah.comm.transport import Transport

HERE = Path(__file__).resolve().parent
RANKS, WARM_UP = 2, 1  # turns of a contestant that are not counted
SIZES = {False: (16, 64, 9, 3), True: (4, 32, 1, 1)}  # rows of a process, pixels, repeats, steps


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
    found, noise = judged(ranks, count * steps * RANKS, warm_up=WARM_UP), watch.end()
    text = report(f"{machine()} {quiet.sentence(noise)}", found)
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
