"""What the user of a plan should know although nothing is wrong with it: a sentence for each.

The advice on the batch comes from published pre-training runs, by the size of the model:

    parameters    tokens of a step    runs
    0.1B to 1B    0.5M to 2M          GPT-3 125M to 760M; Pythia
    1B to 10B     1M to 4M            GPT-3 1.3B and 2.7B; Llama 1 and 2
    10B to 100B   2M to 4M            GPT-3 13B; Llama 1 and 2
    from 100B     2M to 63M           OPT-175B (2M), GPT-3 175B, Llama 3 405B, DeepSeek-V3 (63M)

GPT-3: arXiv 2005.14165, table 2.1. OPT: 2205.01068, table 1. Pythia: 2304.01373. Llama: 2302.13971,
table 2, and 2307.09288, section 2.2; Llama 3: 2407.21783, section 3.4.1. DeepSeek-V3: 2412.19437,
section 4.2. This is what decoders were trained with, not what is best. So a plan gets a note only
if it differs from all of them by more than a factor of two.
"""

from collections.abc import Iterator
from math import log2

from howdah.machines.cluster import Cluster
from howdah.plan.plan import Plan
from howdah.plan.support import unsupported
from howdah.search.layer_window import advice as advice_on_window
from howdah.shapes.parameters import parameters
from howdah.shapes.shape import ModelShape
from howdah.sim.chosen import choice_misfits
from howdah.sim.servers import best_shares, least_paying

# (from how many parameters, the same in words, fewest and most tokens of a step)
PUBLISHED = (
    (1e11, "100B parameters and more", 2e6, 63e6),
    (1e10, "10B to 100B parameters", 2e6, 4e6),
    (1e9, "1B to 10B parameters", 1e6, 4e6),
    (1e8, "0.1B to 1B parameters", 0.5e6, 2e6),
)
FAR = 2.0  # a note is given from this factor on


def notes_on(plan: Plan, cluster: Cluster | None, *, tuned: bool = False) -> list[str]:
    """Everything that the user of `plan` should know about it, as sentences.

    tuned  whether it starts from trained weights, for which no batch of pre-training is advised
    """
    advice = [] if tuned else _batch(plan)
    here = unsupported(plan.shape, plan.layout, precision=plan.method.precision)
    wider = advice_on_window(plan, cluster) if cluster else ()
    return [*here, *choice_misfits(plan), *advice, *_servers(plan), *_memory(cluster), *wider]


def _batch(plan: Plan) -> Iterator[str]:
    assert plan.batch.global_batch is not None
    tokens, size = plan.batch.global_batch * plan.sequence, parameters(plan.shape).total
    rows = [row for row in PUBLISHED if row[0] <= size and plan.shape.family == "decoder"]
    for _, words, fewest, most in rows[:1]:
        if not fewest / FAR <= tokens <= most * FAR:
            change = "raise" if tokens < fewest else "lower"
            published = f"{fewest / 1e6:g}M to {most / 1e6:g}M"
            yield (
                f"a step has {tokens:,} tokens; published pre-training runs of {words} took "
                f"{published}; {change} x or the global batch to come nearer"
            )


def _servers(plan: Plan) -> Iterator[str]:
    """How many parameter servers would pay off."""
    sync, servers = plan.method.sync, plan.layout.server
    workers = sync.workers if sync else plan.layout.workers
    least = least_paying(workers)
    if plan.comm.server_shares:
        return
    if servers > workers:
        yield f"more servers than the {workers} workers wait for them: server{workers} is as fast"
        if sync and servers < 2 * workers:
            sizes = best_shares(workers, servers - workers)
            yield (
                f"{workers} of the servers may stand on the workers' machines, and join last: "
                f"then comm.server_shares={sizes} is best"
            )
    elif servers and not least:
        yield f"on links of one speed, {workers} workers are as fast without servers"
    elif 0 < servers < least:
        yield (
            f"each server moves {workers / servers:.3g} times what a worker does: on links of one "
            f"speed dp{workers} alone is faster, and server{least} the first that is faster still"
        )
        if sync and servers < workers:
            sizes = best_shares(workers, servers)
            yield (
                f"with a server on each of {workers} workers' machines too, every link is busy: "
                f"server{servers + workers} and comm.server_shares={sizes}, those that are alone "
                "first"
            )


def _memory(cluster: Cluster | None) -> Iterator[str]:
    if cluster and not cluster.device.reserved:
        yield (
            f"cluster {cluster.name} does not say device.reserved, the memory in use before the "
            "first tensor; all of a device's memory is taken as free"
        )


def usual_batch(shape: ModelShape, sequence: int) -> int:
    """Samples of a step as published runs of such models have them: in the middle of their range,
    rounded to a power of two. Below 0.1B parameters, of which nothing is published: 131,072 tokens.
    """
    size = parameters(shape).total
    ranges = [(low, high) for least, _, low, high in PUBLISHED if least <= size]
    low, high = ranges[0] if ranges else (1 << 17, 1 << 17)
    return 1 << max(round(log2((low * high) ** 0.5 / sequence)), 0)
