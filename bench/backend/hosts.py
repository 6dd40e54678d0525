"""How fast are FSDP2 and DDP on howdah's backend between two hosts at 1 Gbit/s, beside gloo?

    python bench/backend/hosts.py          hosts.md, hosts.json; needs root (../cluster)
    python bench/backend/hosts.py --tiny   small, writes nothing

README.md says what is compared with what. Both backends have groups of the same processes, one or
two on each host of a box, and take turns, step by step.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[1] / "cluster"))

import quiet
import torch
import torch.distributed as dist
from box import Box
from clusters import rate
from machine import machine
from profiles import profile_named
from run import ALONE, BATCH, Cases, alone, by_turns, net, summary, table, with_ddp, with_fsdp2

from howdah.base.errors import UserError

HERE = Path(__file__).resolve().parent
PROFILE, HOSTS, PORT = "flat-1g", 2, 29740
SENT = {"fsdp2": 1.5, "ddp": 1.0}  # times the model's bytes, by a card, where each goes over once
APART = 1e-5  # sums of four in two orders, in float32


def rank_main(width: int, rounds: int) -> None:
    """One rank; rank 0 prints its seconds by case and backend."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    groups = {name: dist.new_group(backend=name) for name in ("howdah", "gloo")}
    torch.manual_seed(dist.get_rank())
    x = torch.randn(BATCH, width)
    found: Cases = {"fsdp2": {}, "ddp": {}}
    for name, group in groups.items():
        found["fsdp2"][name] = with_fsdp2(group, width, x, shared=name == "howdah")
        found["ddp"][name] = with_ddp(group, width, x)
    for steps in found.values():
        steps[ALONE] = alone(width, x)["model"]
    told = {case: by_turns(steps, rounds) for case, steps in found.items()}
    if dist.get_rank() == 0:
        print(json.dumps(told), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def measured(box: Box, each: int, width: int, rounds: int) -> dict[str, Any]:
    """All cases, with so many ranks on each host; and bytes that the card of host 0 has sent."""
    runs = []
    for rank in range(HOSTS * each):
        facts = {"RANK": rank, "WORLD_SIZE": HOSTS * each, "MASTER_ADDR": "host0"}
        facts |= {"MASTER_PORT": PORT + each, "OMP_NUM_THREADS": 1, "GLOO_SOCKET_IFNAME": "eth0"}
        command = [sys.executable, HERE / "hosts.py", "--rank", width, rounds]
        env = {**os.environ, **{name: str(value) for name, value in facts.items()}}
        env |= box.environment(rank // each)
        pipe: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        runs.append(box.start(rank // each, command, env, **pipe))
    ends = [run.communicate() for run in runs]
    if any(run.returncode for run in runs):
        raise UserError("the ranks of the box have failed: " + ends[0][1].strip()[-2000:])
    told: dict[str, Any] = json.loads(ends[0][0].strip().splitlines()[-1])
    size = sum(4 * weight.numel() for weight in net(width).parameters())
    fast = rate(profile_named(PROFILE, HOSTS).card)
    return {
        f"{case}, {HOSTS} x {each}": {**one, "link": SENT[case] * size / fast}
        for case, one in told.items()
    }


def main() -> int:
    """Measures, and writes what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="small, and writes nothing")
    parser.add_argument("--rank", type=int, nargs=2, help=argparse.SUPPRESS)
    quiet.add_option(parser)
    options = parser.parse_args()
    if options.rank:
        rank_main(*options.rank)
        return 0
    watch = quiet.Watch(writes=not options.tiny, loaded=options.loaded)
    width, rounds = (64, 2) if options.tiny else (1024, 12)
    told: dict[str, Any] = {}
    try:
        with Box(profile_named(PROFILE, HOSTS), HOSTS) as box:
            for each in (1, 2):
                told |= measured(box, each, width, rounds)
    except UserError as problem:
        print(f"backend: {problem}", file=sys.stderr)
        return 2
    rows, looks = summary(told, {}), watch.end()
    if apart := [name for name, one in told.items() if one["apart"] > APART]:
        print(f"backend: other results than gloo's: {', '.join(apart)}", file=sys.stderr)
        return 1
    print(table(rows))
    if not options.tiny:
        kept = {"machine": machine(), "noise": looks, "width": width, "rows": rows}
        (HERE / "hosts.json").write_text(json.dumps(kept, indent=1) + "\n")
        title = "# The torch backend between two hosts, beside gloo"
        said = f"{title}\n\n{quiet.sentence(looks)}\n\n{table(rows)}\n"
        (HERE / "hosts.md").write_text(said)
    return 0


if __name__ == "__main__":
    sys.exit(main())
