"""Steps of zero3 with the parts of ZeRO++ between two hosts at 1 Gbit/s, beside plain zero3.

    python bench/zeropp/run.py          results.md, results.json; needs root (../cluster)
    python bench/zeropp/run.py --tiny   a small model, two rounds; writes nothing

README.md says what is compared with what. All forms live in the same four processes, two on each
host of a box, and take turns, step by step. Exit code 1 where bytes are not those predicted, where
a second copy changes a loss, or where all three together do not send four times less.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[1] / "cluster"))

import numpy as np
import quiet
import torch
from box import Box
from clusters import cluster_of, rate
from forms import COPIED, FORMS, NODE, OTHERS, PLAIN, RANKS, WHOLE, Form
from machine import machine
from profiles import profile_named

from howdah.base.errors import UserError
from howdah.comm.rendezvous import join
from howdah.comm.transport import SingleRank, Transport
from howdah.host.facts import allowed_cores
from howdah.machines.cluster import Device, Flops
from howdah.machines.topology import Pair
from howdah.parallel.apply import apply
from howdah.parallel.flat_params import random_init
from howdah.parallel.mesh import connect_mesh
from howdah.plan.batch import Batch
from howdah.plan.comm import Comm
from howdah.plan.layout import parse_layout
from howdah.plan.method import LearningRate, Method
from howdah.plan.plan import Plan, make_plan
from howdah.plan.recording import Wires
from howdah.shapes.shape import ModelShape
from howdah.shapes.weights import weights
from howdah.sim.profile import PLAIN as PLAIN_PROFILE
from howdah.sim.step_time import step_time
from howdah.sim.traffic import step_traffic
from howdah.text.batches import Micro
from howdah.train.step import StepContext, train_step

HERE = Path(__file__).resolve().parent
PROFILE, HOSTS, PORT = "flat-1g", 2, 29760
CARD = "eth0"
SEED, RATE = 1, 1e-3
WARM_UP = 1  # step: it learns the order of gathers
GOAL = 4.0  # times fewer bytes between hosts than plain zero3
HEADERS = 1.10  # bytes that a card sends for one of a message, at most, as in ../cluster/prove.py
SMALL = 256 << 10  # bytes of a step that are no messages: signs of life, acknowledgements
ALONE = "alone"
WIRE = Pair(0.0, 1e-4, 2e-5)  # seconds of a message between two hosts of a box, as usually measured


@dataclass(frozen=True)
class Case:
    """What is trained.

    micros   micro-batches of a step, of one row on each rank
    rounds   in each of which every form makes a step
    """

    micros: int
    rounds: int
    tiny: bool = False

    @property
    def shape(self) -> ModelShape:
        """12.2 million parameters; tiny: 90 thousand."""
        size = (2, 64, 2, 128) if self.tiny else (6, 384, 6, 1024)
        vocab = 256 if self.tiny else 4096
        return ModelShape(*size, vocab=vocab, context=self.sequence, tie_embeddings=True)

    @property
    def sequence(self) -> int:
        return 16 if self.tiny else 128

    @property
    def name(self) -> str:
        return f"x{self.micros}"

    def plan(self, form: Form | None) -> Plan:
        """The plan of a form; None: of one rank alone, with the micro-batches of a rank."""
        method = Method("bf16", lr=LearningRate(RATE, schedule="constant"))
        words, replicas = ("single", 1) if form is None else (form.words, RANKS)
        layout = parse_layout(f"{words} x{self.micros}")
        batch = Batch(replicas * self.micros, 1)
        method = form.of(method) if form else method
        made = make_plan(self.shape, layout, batch, sequence=self.sequence, method=method)
        return replace(made, comm=Comm(form.algorithms)) if form else made

    def batch(self, rank: int) -> list[Micro]:
        """Skewed random tokens."""
        draw = np.random.default_rng([SEED, rank]).random((self.micros, self.sequence + 1))
        ids, at = (self.shape.vocab * draw**4).astype(np.int64), np.arange(self.sequence)[None]
        none = np.zeros((1, self.sequence), np.int32)
        return [
            Micro(row[None, :-1].copy(), row[None, 1:].copy(), at, none, np.array([number]))
            for number, row in enumerate(ids)
        ]


def cases(*, tiny: bool) -> list[Case]:
    return [Case(n, 2, tiny=True) for n in (1, 2)] if tiny else [Case(1, 11), Case(4, 8)]


# -- a rank ------------------------------------------------------------------------


class Contestant:
    """train_step of one form. Calling it is one step of this rank; returns the loss."""

    def __init__(self, case: Case, form: Form | None, wire: Transport) -> None:
        plan, self._micros = case.plan(form), case.batch(wire.rank)
        among: Transport = wire if form else SingleRank()
        device = torch.device("cpu")
        self.mesh = connect_mesh(plan.layout, among, device, plan.comm.algorithm)
        placed = apply(plan, mesh=self.mesh, fill=random_init(weights(plan.shape), SEED))
        self._context, self._done = StepContext(placed, self.mesh, plan.method, SEED), 0

    def __call__(self) -> float:
        self._done += 1
        return train_step(self._context, self._micros, step=self._done - 1, rate=RATE).loss

    def sent(self) -> int:
        """Bytes that this rank has sent so far, as howdah counts them."""
        return sum(self.mesh.counters.sent().values())


def rank_main(some: Sequence[Case]) -> None:
    """One rank; rank 0 prints what `measured` returns, a case a line."""
    torch.set_num_threads(1)
    with closing(join()) as wire:
        for case in some:
            told = by_turns(case, wire)
            if wire.rank == 0:
                print(json.dumps(told), flush=True)


def by_turns(case: Case, wire: Transport) -> dict[str, Any]:
    """Of each form: seconds of its steps, bytes that this host's card has sent in each, bytes that
    all ranks have counted; and its losses, those of the warm-up first.
    """
    every = {**FORMS, **OTHERS, ALONE: None}
    steps = {name: Contestant(case, form, wire) for name, form in every.items()}
    told: dict[str, Any] = {name: {"seconds": [], "card": [], "sent": []} for name in steps}
    losses: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(WARM_UP + case.rounds):
        names = [*steps][turn % len(steps) :] + [*steps][: turn % len(steps)]
        for name in names:
            one, sent = steps[name], steps[name].sent()
            wire.barrier()
            before, began = card(), perf_counter()
            losses[name].append(one())
            wire.barrier()
            row = {"seconds": perf_counter() - began, "card": card() - before}
            row["sent"] = total(wire, one.sent() - sent)
            for key, value in row.items() if turn >= WARM_UP else ():
                told[name][key].append(value)
    for one in steps.values():
        one.mesh.close()
    return {"forms": told, "losses": losses}


def card() -> int:
    """Bytes that the card of this host has sent, with all headers."""
    lines = Path("/proc/net/dev").read_text("utf-8").splitlines()
    row = next(line for line in lines if line.strip().startswith(f"{CARD}:"))
    return int(row.partition(":")[2].split()[8])


def total(wire: Transport, count: int) -> int:
    """The sum over all ranks."""
    counts = torch.tensor([count], dtype=torch.int64)
    wire.all_reduce(counts)
    return int(counts)


# -- what is predicted -------------------------------------------------------------


def leaving(plan: Plan) -> int:
    """Bytes that the first host sends to the other in a step."""
    wires = Wires("inside", "between", NODE)
    rows = (row for rank in range(NODE) for row in step_traffic(plan, rank, wires).items())
    return sum(count for row, count in rows if row.link == "between")


def predicted(case: Case, alone: float) -> dict[str, dict[str, float]]:
    """Of each form: bytes that a host sends and that all ranks send, the seconds of the first on
    the link, and those of a step on machines where one rank alone takes `alone` seconds.
    """
    found = {}
    profile = replace(PLAIN_PROFILE, crowd=max(RANKS / allowed_cores(), 1.0))
    single = step_time(case.plan(None), box_of(1.0), profile).seconds
    for name, form in {**FORMS, **OTHERS}.items():
        plan, bytes_ = case.plan(form), leaving(case.plan(form))
        found[name] = {
            "leaving": bytes_,
            "all": sum(sum(step_traffic(plan, rank).values()) for rank in range(RANKS)),
            "bound": bytes_ / rate(profile_named(PROFILE, HOSTS).card),
            "seconds": step_time(plan, box_of(single / alone), profile).seconds,
        }
    return found


def box_of(speed: float) -> Any:
    """The box as a cluster whose cores are so many times as fast as 100 GFLOP/s and 10 GB/s."""
    flops = Flops(float32=speed * 1e11, bf16=speed * 1e11)
    made = cluster_of(PROFILE, profile_named(PROFILE, HOSTS), HOSTS, NODE, wire=WIRE)
    return replace(made, device=Device("CPU core", 1e12, speed * 1e10, flops))


# -- all of it ---------------------------------------------------------------------


def measured(some: Sequence[Case]) -> list[dict[str, Any]]:
    """What `by_turns` finds of each case, on a box."""
    with Box(profile_named(PROFILE, HOSTS), HOSTS) as box:
        runs = []
        for rank in range(RANKS):
            facts = {"RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_RANK": rank % NODE}
            facts |= {"LOCAL_WORLD_SIZE": NODE, "MASTER_ADDR": "host0", "MASTER_PORT": PORT}
            facts |= {"OMP_NUM_THREADS": 1, "TORCH_CPP_LOG_LEVEL": "ERROR"}
            env = {**os.environ, **{name: str(value) for name, value in facts.items()}}
            command = [sys.executable, HERE / "run.py", "--rank", json.dumps([*map(asdict, some)])]
            pipe: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            env |= box.environment(rank // NODE)
            runs.append(box.start(rank // NODE, command, env, text=True, **pipe))
        ends = [run.communicate() for run in runs]
    for run, (_, said) in zip(runs, ends, strict=True):
        if run.returncode:
            raise UserError("the ranks of the box have failed: " + said.strip()[-2000:])
    return [json.loads(line) for line in ends[0][0].splitlines() if line.startswith("{")]


def summary(case: Case, told: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each form: bytes and seconds of a step, beside plain zero3 and what is predicted;
    and one of a rank alone, of which only the seconds are told.
    """
    alone = median(told["forms"][ALONE]["seconds"])
    wanted, rows = predicted(case, alone), []
    for name, one in told["forms"].items():
        low, _, high = quantiles(one["seconds"], n=4)
        row: dict[str, Any] = {"case": case.name, "form": name, "quartiles": [low, high]}
        row["seconds"] = median(one["seconds"])
        if name in wanted:
            row["predicted"] = wanted[name]
            row["card"] = median(one["card"])
            row["counted"] = sorted({*one["sent"]})
            row["fewer"] = wanted[PLAIN]["leaving"] / wanted[name]["leaving"]
        rows.append(row)
    plain = {row["form"]: row for row in rows}[PLAIN]
    for row in rows:
        row["faster"] = plain["seconds"] / row["seconds"]
        if "card" in row:
            row["fewer on the card"] = plain["card"] / row["card"]
    return rows


def faults(rows: list[dict[str, Any]], losses: dict[str, list[float]]) -> list[str]:
    """A sentence for each thing of a case that is not as it must be."""
    found = []
    for row in rows:
        if "card" not in row:
            continue
        where, wanted = f"{row['case']} {row['form']}", row["predicted"]
        if row["counted"] != [wanted["all"]]:
            found.append(f"{where}: counted {row['counted']} bytes, not {wanted['all']:,.0f}")
        if not wanted["leaving"] <= row["card"] <= HEADERS * wanted["leaving"] + SMALL:
            found.append(f"{where}: the card sent {row['card']:,.0f}, not {wanted['leaving']:,.0f}")
        fewer = min(row["fewer"], row["fewer on the card"])
        if row["form"] == WHOLE and fewer < GOAL:
            found.append(f"{where}: sends {fewer:.2f} times less, not {GOAL:g}")
    if losses[COPIED] != losses[PLAIN]:
        found.append(f"{rows[0]['case']} {COPIED}: other losses than {PLAIN}")
    return found


def table(rows: list[dict[str, Any]]) -> str:
    head = "| case | form | MB between hosts, predicted | on the card | times less | seconds "
    head += "| quartiles | times faster | bound of the link | predicted |"
    lines = [head, "|---" * 10 + "|"]
    for row in rows:
        low, high = row["quartiles"]
        cells = [row["case"], row["form"]]
        sent, bound, seconds = ["", "", ""], "", ""
        if "card" in row:
            wanted = row["predicted"]
            sent = [f"{count / 1e6:.2f}" for count in (wanted["leaving"], row["card"])]
            sent.append(f"{row['fewer']:.2f}")
            bound, seconds = f"{wanted['bound']:.3f}", f"{wanted['seconds']:.3f}"
        cells += [*sent, f"{row['seconds']:.3f}", f"{low:.3f} to {high:.3f}"]
        cells += [f"{row['faster']:.2f}", bound, seconds]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def report(results: dict[str, Any]) -> str:
    """results.md."""
    wrong = [f"- {one}" for one in results["faults"]]
    said = f"{results['machine']} {quiet.sentence(results['noise'])}"
    lines = ["# Steps of zero3 with the parts of ZeRO++, between two hosts at 1 Gbit/s", "", said]
    lines += ["", table(results["rows"]), "", "Faults:" if wrong else "No faults.", *wrong]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Measures, and writes what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="a small model, and writes nothing")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    quiet.add_option(parser)
    options = parser.parse_args()
    if options.rank:
        rank_main([Case(**one) for one in json.loads(options.rank)])
        return 0
    watch = quiet.Watch(writes=not options.tiny, loaded=options.loaded)
    rows, wrong = [], []
    try:
        some = cases(tiny=options.tiny)
        for case, told in zip(some, measured(some), strict=True):
            found = summary(case, told)
            rows += found
            wrong += faults(found, told["losses"])
    except UserError as problem:
        print(f"zeropp: {problem}", file=sys.stderr)
        return 2
    results = {"machine": machine(), "noise": watch.end(), "rows": rows, "faults": wrong}
    print(report(results))
    if not options.tiny:
        (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n")
        (HERE / "results.md").write_text(report(results))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
