"""Tokens per second of a training job between hosts, beside DDP and FSDP2 and the link's bound.

    python bench/hosts_job/run.py               every job, writes results.md, results.json
    python bench/hosts_job/run.py --minutes 3   ends after so many; the next call goes on
    python bench/hosts_job/run.py --only zero3  jobs whose name holds this; writes nothing
    python bench/hosts_job/run.py --tiny        two small jobs; writes nothing

Needs root: hosts and their network are those of ../cluster. What is measured is kept in
build/hosts_job, job by job; --anew forgets it. README.md says what is compared with what.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[1] / "cluster"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "data_parallel"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "forms"))

import quiet
from box import Box
from job_tables import report, summary
from jobs import Job, jobs
from machine import machine
from measure import Block, Blocks
from on_hosts import TRACE, rank_main
from profiles import profile_named

from howdah.base.errors import UserError
from howdah.draw.measured_step import compare_step
from howdah.draw.measured_step import report as trace_lines
from howdah.plan.trace_file import read_traces

HERE = Path(__file__).resolve().parent
STORE = HERE.parents[1] / "build" / "hosts_job"
PORT = 29780


def measured(job: Job) -> dict[str, Any]:
    """The turns of each rank, and what `howdah trace` says of howdah's last steps."""
    with Box(profile_named(job.profile, job.hosts), job.hosts) as box:
        runs = []
        for rank in range(job.ranks):
            host, local = divmod(rank, job.each)
            facts = {"RANK": rank, "WORLD_SIZE": job.ranks, "LOCAL_RANK": local}
            facts |= {"LOCAL_WORLD_SIZE": job.each, "MASTER_ADDR": "host0", "MASTER_PORT": PORT}
            facts |= {"OMP_NUM_THREADS": 1, "GLOO_SOCKET_IFNAME": "eth0"}
            facts |= {"TORCH_CPP_LOG_LEVEL": "ERROR"}
            env = {**os.environ, **{name: str(value) for name, value in facts.items()}}
            env |= box.environment(host)
            tiny = ["--tiny"] if job.profile == "flat-10g" else []
            command = [sys.executable, HERE / "run.py", "--rank", job.name, *tiny]
            pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            runs.append(box.start(host, command, env, text=True, **pipes))
        ends = [run.communicate() for run in runs]
        for run, (_, said) in zip(runs, ends, strict=True):
            if run.returncode:
                raise UserError("the ranks of the box have failed: " + said.strip()[-2000:])
        with tempfile.TemporaryDirectory() as folder:
            for rank in range(job.ranks):
                name = f"rank-{rank}.json"
                shutil.copy(box.file(rank // job.each, TRACE / name), folder)
            traces = read_traces(Path(folder), str(job.plan.layout), job.ranks)
    turns = [json.loads(said.strip().splitlines()[-1]) for said, _ in ends]
    lines = [*trace_lines(compare_step(job.plan, traces), job.layout)]
    return {"job": job.name, "turns": turns, "trace": lines}


def take(some: Sequence[Job], minutes: float) -> Iterator[dict[str, Any]]:
    """What is measured of the jobs, now or before, until the minutes are over."""
    until = monotonic() + 60 * minutes
    for job in some:
        kept = STORE / f"{job.name}.json"
        if not kept.is_file():
            if monotonic() > until:
                continue
            began = monotonic()
            told = measured(job)
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps(told), "utf-8")
            print(f"{job.name}: {monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        yield json.loads(kept.read_text("utf-8"))


def turns_of(told: dict[str, Any]) -> list[Blocks]:
    """The turns of each rank, as they were measured there."""
    return [
        {name: [Block(**turn) for turn in turns] for name, turns in rank.items()}
        for rank in told["turns"]
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="two small jobs; writes nothing")
    parser.add_argument("--only", default="", help="jobs whose name holds this; writes nothing")
    parser.add_argument("--minutes", type=float, default=12.0, help="after which no job begins")
    parser.add_argument("--anew", action="store_true", help="forget what is kept of earlier calls")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    quiet.add_option(parser)
    words = parser.parse_args()
    some = [job for job in jobs(tiny=words.tiny) if words.only in job.name]
    if words.rank:
        rank_main(next(job for job in jobs(tiny=words.tiny) if job.name == words.rank))
        return 0
    for job in some if words.anew or words.tiny else ():
        (STORE / f"{job.name}.json").unlink(missing_ok=True)
    try:
        watch = quiet.Watch(writes=not (words.tiny or words.only), loaded=words.loaded)
        found = [*take(some, words.minutes)]
    except UserError as problem:
        print(f"hosts_job: {problem}", file=sys.stderr)
        return 2
    by_name = {job.name: job for job in some}
    rows = [summary(by_name[one["job"]], turns_of(one), one["trace"]) for one in found]
    noise = watch.end()
    text = report(f"{machine()} {quiet.sentence(noise)}", rows)
    print(text)
    if wrong := [sentence for row in rows for sentence in row["problems"]]:
        print("\n".join(wrong), file=sys.stderr)
        return 1
    if missing := len(some) - len(rows):
        print(f"{missing} of {len(some)} jobs are still to be measured", file=sys.stderr)
    elif watch.writes:
        kept = {"machine": machine(), "noise": noise, "jobs": rows}
        (HERE / "results.md").write_text(text + "\n", "utf-8")
        (HERE / "results.json").write_text(json.dumps(kept, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
