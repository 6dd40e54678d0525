"""One version of howdah on the ranks of one layout: runs steps when it is told to.

    serve.py WORDS ROWS FOLDER        howdah and the cases are those of PYTHONPATH

Each rank reads numbers of steps from FOLDER/go-RANK, runs so many, and writes their seconds and
losses to FOLDER/done-RANK. Between its turns it waits for a file, and takes no processor.
"""

import json
import sys
from pathlib import Path
from time import perf_counter

from cases import SMALL, Case, batch
from howdahs import HowdahStep

from howdah.comm.spawn import Workers
from howdah.comm.transport import Transport
from howdah.plan.layout import parse_layout
from howdah.plan.mesh_axes import axis

POOL = 16  # batches made before the clock starts


def serve(transport: Transport, words: str, rows: int, folder: str) -> None:
    layout, rank = parse_layout(words), transport.rank
    assert layout.micros is not None
    case = Case(
        *("4.2M", SMALL, "float32", 128), ranks=layout.replicas, micros=layout.micros,
        steps=1, blocks=1, rows=rows,
    )  # fmt: skip
    replica = axis(layout, "replicas").index_of(rank)
    pool = [batch(case, step=step, rank=replica) for step in range(POOL)]
    step, done = HowdahStep(case, layout, transport), 0
    with (
        Path(folder, f"go-{rank}").open(encoding="utf-8") as go,
        Path(folder, f"done-{rank}").open("w", encoding="utf-8") as answers,
    ):
        for line in go:
            losses, began = [], perf_counter()
            for _ in range(int(line)):
                losses.append(step(pool[done % POOL]))
                done += 1
            answers.write(json.dumps([perf_counter() - began, losses]) + "\n")
            answers.flush()


if __name__ == "__main__":
    words, rows, folder = sys.argv[1:]
    with Workers(parse_layout(words).world, threads=1) as workers:
        workers.run(serve, words, int(rows), folder)
