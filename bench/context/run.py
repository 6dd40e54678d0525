"""Sequences shared by ranks: which attention is faster, and how long a sequence fits.

    python bench/context/run.py           results.md and results.json
    python bench/context/run.py --only 2  degrees of cp with this number; writes nothing

Times: steps of a small model of two blocks with `context=ring`, `all-to-all` and `both`, over a
grid of tokens, heads and cp. The planner has a price for each; its choice is the cheaper one. A
cell is met where that is the one that was measured faster, or no more than 2 % slower. The regret
is the time of the choice beside that of the faster one, over all cells. Exit code 1 where fewer
than 90 % are met.

Lengths: of the model, the longest sequence whose predicted bytes on each rank (weights, states,
activations) stay within a budget, at cp 1, 2 and 4; and the bytes that its ranks were measured to
hold at that length.
"""

import argparse
import json
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import numpy as np
import quiet
import torch
from machine import machine

from howdah.comm.spawn import Workers
from howdah.comm.transport import Transport
from howdah.machines.cluster_file import load_cluster
from howdah.parallel.apply import apply
from howdah.parallel.flat_params import random_init
from howdah.parallel.mesh import connect_mesh
from howdah.plan.batch import Batch
from howdah.plan.layout import parse_layout
from howdah.plan.method import Method
from howdah.plan.plan import Plan, make_plan
from howdah.shapes.shape import ModelShape
from howdah.shapes.weights import weights
from howdah.sim.predict import predict
from howdah.text.batches import Micro
from howdah.train.report import measured_memory, predicted_memory
from howdah.train.step import StepContext, train_step

TOKENS, HEADS, DEGREES = (512, 1024, 2048), ((4, 4), (8, 8), (8, 2)), (2, 4)
KINDS = ("ring", "all-to-all", "both")  # the last where cp has groups
STEPS, ROUNDS = 6, 3  # the first step of a round is not counted; kinds take turns
NEAR, WANTED = 0.02, 0.9
BUDGET = 64 << 20  # bytes of a rank
WIDTH, VOCAB, LONGEST = 256, 512, 1 << 17
HERE = Path(__file__).resolve().parent


def plan_of(cp: int, kind: str, tokens: int, heads: tuple[int, int]) -> Plan:
    """A model of two blocks, on samples of so many tokens."""
    shape = ModelShape(
        layers=2,
        width=WIDTH,
        heads=heads[0],
        kv_heads=heads[1],
        ffn_size=2 * WIDTH,
        vocab=VOCAB,
        context=LONGEST,
        tie_embeddings=True,
    )
    words = f"cp{cp} context={kind}" if cp > 1 else "single"
    layout, method = parse_layout(words), Method("float32")
    return make_plan(shape, layout, Batch(1, 1), sequence=tokens, method=method)


# -- on a rank


def ready(transport: Transport, plan: Plan) -> tuple[StepContext, Micro]:
    mesh = connect_mesh(plan.layout, transport, torch.device("cpu"))
    placed = apply(plan, mesh=mesh, fill=random_init(weights(plan.shape), 1))
    at = np.arange(plan.sequence)[None]
    tokens = at * 7919 % plan.shape.vocab
    micro = Micro(tokens, tokens.copy(), at, np.zeros(at.shape, np.int32), np.zeros(1, np.int64))
    return StepContext(placed, mesh, plan.method, seed=1), micro


def timed(transport: Transport, plan: Plan) -> list[float]:
    """Seconds of each step but the first."""
    torch.set_num_threads(1)
    context, micro = ready(transport, plan)
    seconds = []
    with context.mesh:
        for step in range(STEPS):
            context.mesh.world.barrier()
            began = perf_counter()
            train_step(context, [micro], step=step, rate=1e-4)
            context.mesh.world.barrier()
            seconds.append(perf_counter() - began)
    return seconds[1:]


def held(transport: Transport, plan: Plan) -> int:
    """Bytes that this rank holds."""
    torch.set_num_threads(1)
    context, micro = ready(transport, plan)
    with context.mesh:
        return sum(measured_memory(context, micro).values())


# -- what is reported


def cell(workers: Workers, cp: int, tokens: int, heads: tuple[int, int]) -> dict[str, Any] | None:
    """Times of both kinds; None where the heads do not fit."""
    if cp > heads[1] and (cp % heads[1] or cp // heads[1] > heads[0] // heads[1]):
        return None
    cluster = replace(load_cluster("laptop-cpu"), devices_per_node=cp)
    predicted = {}
    kinds = KINDS if cp > 3 else KINDS[:2]
    seconds = {kind: list[float]() for kind in kinds}
    plans = {kind: plan_of(cp, kind, tokens, heads) for kind in kinds}
    for kind, plan in plans.items():
        time = predict(plan, cluster).time
        assert time is not None
        predicted[kind] = time.seconds
    for _ in range(ROUNDS):
        for kind, plan in plans.items():
            seconds[kind] += workers.run(timed, plan, ranks=cp)[0]
    measured = {kind: median(some) for kind, some in seconds.items()}
    chosen = min(kinds, key=predicted.__getitem__)
    regret = measured[chosen] / min(measured.values()) - 1
    return {
        "cp": cp,
        "tokens": tokens,
        "heads": heads[0],
        "key-value heads": heads[1],
        "measured": measured,
        "predicted": predicted,
        "chosen": chosen,
        "regret": regret,
        "met": regret <= NEAR,
    }


def longest(workers: Workers, cp: int) -> dict[str, Any]:
    """The longest sequence within the budget, by the prediction, and what its ranks hold."""

    def most(tokens: int) -> int:
        plan = plan_of(cp, "ring", tokens, (8, 2))
        return max(sum(predicted_memory(plan, r, packed=False).values()) for r in range(cp))

    low, high = 2 * cp, LONGEST
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if most(middle) <= BUDGET else (low, middle - 1)
    found = max(workers.run(held, plan_of(cp, "ring", low, (8, 2)), ranks=cp))
    return {"cp": cp, "tokens": low, "predicted": most(low), "measured": found}


def markdown(results: dict[str, Any]) -> str:
    """The whole of results.md."""
    rows, noise = results["cells"], quiet.sentence(results.get("noise", []))
    met = sum(row["met"] for row in rows)
    lines = ["# Sequences shared by ranks: results", "", f"{results['machine']} {noise}", ""]
    lines += [
        f"The planner's choice is the faster one in {met} of {len(rows)} cells; regret over all "
        f"{results['regret']:.1%}.",
        "",
        "| cp | tokens | heads | ring, ms | all-to-all, ms | both, ms | chosen | regret |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        times = [row["measured"].get(kind) for kind in KINDS]
        ring, trade, both = ("" if time is None else f"{time * 1e3:.1f}" for time in times)
        lines.append(
            f"| {row['cp']} | {row['tokens']:,} | {row['heads']} of {row['key-value heads']} "
            f"| {ring} | {trade} | {both} | {row['chosen']} | {row['regret']:.1%} |"
        )
    lines += ["", f"The longest sequence in {BUDGET >> 20} MiB of a rank:", ""]
    lines += ["| cp | tokens | predicted bytes | measured bytes |", "|---|---|---|---|"]
    lines += [
        f"| {row['cp']} | {row['tokens']:,} | {row['predicted']:,} | {row['measured']:,} |"
        for row in results["lengths"]
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", type=int, default=0, help="this degree; writes nothing")
    quiet.add_option(parser)
    words = parser.parse_args()
    watch, rows = quiet.Watch(writes=not words.only, loaded=words.loaded), []
    degrees = [cp for cp in DEGREES if words.only in (0, cp)]
    with Workers(max(DEGREES)) as workers:
        for cp, tokens, heads in product(degrees, TOKENS, HEADS):
            if row := cell(workers, cp, tokens, heads):
                rows.append(row)
                print(row, flush=True)
        lengths = [longest(workers, cp) for cp in (1, *degrees)]
    for row in lengths:
        print(row)
    best = sum(min(row["measured"].values()) for row in rows)
    regret = sum(row["measured"][row["chosen"]] for row in rows) / best - 1
    results = {"machine": machine(), "noise": watch.end(), "cells": rows, "lengths": lengths}
    results["regret"] = regret
    print(f"regret {regret:.1%}")
    if not words.only:
        (HERE / "results.md").write_text(markdown(results), encoding="utf-8")
        (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    exact = all(row["predicted"] == row["measured"] for row in lengths)
    return 0 if exact and sum(row["met"] for row in rows) >= WANTED * len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
