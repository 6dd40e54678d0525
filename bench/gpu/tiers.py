"""I: what is kept off the card (docs/forms/offload.md).

links      copies between the card and page-locked memory, and through the rooms of a lane
proved     `verify` with states and activations on the host and on the disk
1b         steps with nothing off the card, with the optimizer on the host, with all states there,
           with activations there; DeepSpeed's ZeRO-Offload
large      the largest model of a list whose states fit the host of this machine
"""

import os
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import torch
from parity import METHODS, PROVED, case_of, proved
from peers import begin, imported, llama, tokens
from rows import Place, Report, Unavailable
from speed import LENGTH, ONE, small
from steps import Stepper, stepper

from howdah.comm.handle import DONE
from howdah.comm.lane import CudaStreams
from howdah.comm.spawn import Workers
from howdah.comm.transport import SingleRank
from howdah.host.facts import free_memory
from howdah.host.page_memory import whole_pages
from howdah.parallel.home_lanes import CardLane, Locks
from howdah.plan.batch import Batch
from howdah.plan.homes import WAYS
from howdah.plan.layout import parse_layout, resolve
from howdah.plan.method import Method
from howdah.plan.plan import for_gpus, make_plan
from howdah.shapes.presets import preset
from howdah.shapes.shape import ModelShape
from howdah.train.report import predicted_memory

STATES = "weights={0} gradients={0} optimizer={0}"
HOST = STATES.format("host")
PROOFS = (
    "x2 optimizer=host",
    f"x2 {HOST} activations=host",
    f"x2 {STATES.format('disk')} activations=disk",
)
STEPS = ("tokens/s", "step ms", "exposed share", "allocated", "planned", "host planned")


@dataclass(frozen=True)
class Kept:
    """A row: a model, and what of it is kept off the card."""

    shape: ModelShape
    words: str
    rows: int = 8


RUNS = {
    "1b, all on the card": Kept(ONE, "x2"),
    "1b, optimizer=host": Kept(ONE, "x2 optimizer=host"),
    "1b, all states on the host": Kept(ONE, f"x2 {HOST}"),
    "1b, activations=host": Kept(ONE, "x1 activations=host"),
}
LARGE = (  # of which the first is taken that fits
    ("llama2-13b", f"x2 {HOST} recompute=full"),
    ("llama3-8b", "x2 optimizer=host recompute=full"),
    ("llama3-8b", f"x2 {HOST} recompute=full"),
    ("llama3-3b", f"x2 {HOST} recompute=full"),
)
PROCESS = 8e9  # bytes of the host that are left to everything else
DEEPSPEED = "1b, DeepSpeed ZeRO-Offload"
ROWS = {
    "links": ("up GB/s", "down GB/s", "up through rooms GB/s", "down through rooms GB/s"),
    **dict.fromkeys(PROOFS, PROVED),
    **dict.fromkeys(RUNS, STEPS),
    DEEPSPEED: ("tokens/s", "step ms", "allocated"),
    "the largest that fits": ("model", "layout", *STEPS),
}


def measure(place: Place, report: Report) -> None:
    report.measure("links", partial(links, place))
    with Workers(1, device=place.device.type) as one:
        for words in PROOFS:
            case = case_of(words, method=METHODS["float64"], device=place.device, steps=1)
            report.measure(words, partial(proved, case, one))
    for name, kept in RUNS.items():
        report.measure(name, partial(steps, place, kept))
    report.measure(DEEPSPEED, partial(deepspeed, place))
    report.measure("the largest that fits", partial(largest, place))


def links(place: Place) -> dict[str, Any]:
    """Copies of float32 from and to locked memory; to bf16 and from memory that is not locked."""
    if place.cpu:
        raise Unavailable("the card and the host are one memory")
    with closing(Locks()) as locks:
        return rates(place, locks)


def rates(place: Place, locks: Locks) -> dict[str, Any]:
    size, found = 64 << 20, []
    card = torch.empty(size, dtype=torch.float32, device=place.device)
    locked = locks.lock(whole_pages(size, torch.float32))
    plain, narrow = whole_pages(size, torch.float32), card[: size // 2].view(torch.bfloat16)
    for host, device in ((locked, card), (plain, narrow)):
        for way in WAYS:
            lane = CardLane(way, CudaStreams(place.device), locks)
            out, source = (device, host) if way == "fetch" else (host, device)
            if host is plain and way == "evict":
                source = card
            move = partial(moved, lane, out, source)
            found.append(min(out.nbytes, source.nbytes) / place.seconds(move, repeats=3) / 1e9)
            lane.thread.shutdown()
    return dict(zip(ROWS["links"], found, strict=True))


def moved(lane: CardLane, out: torch.Tensor, source: torch.Tensor) -> None:
    with lane.behind(lane.called(), DONE):
        lane.copy(out, source)


def opened(place: Place, kept: Kept) -> Any:
    shape = place.pick(kept.shape, small(kept.shape))
    rows, length = place.pick((kept.rows, LENGTH), (1, 16))
    how: dict[str, Any] = {"device": place.device, "method": Method("bf16")}
    return stepper(shape, kept.words, SingleRank(), rows=rows, length=length, **how)


def steps(place: Place, kept: Kept, count: int = 3) -> dict[str, Any]:
    """Steps of a row behind the first, and what share of them the card waits for moves."""
    with opened(place, kept) as one:
        one()
        begin(place)
        before, began = waited(one), perf_counter()
        for _ in range(count):
            one()
        place.sync()
        took = (perf_counter() - began) / count
        plan = one.context.placed.plan
        rows, length = place.pick((kept.rows, LENGTH), (1, 16))
        held = predicted_memory(plan, 0, packed=False)
        away = sum(size for name, size in held.items() if name.endswith("at host"))
        return {
            "tokens/s": rows * length * plan.micros / took,
            "step ms": 1e3 * took,
            "exposed share": (waited(one) - before) / count / took,
            "allocated": None if place.cpu else torch.cuda.max_memory_allocated(place.device),
            "planned": sum(size for name, size in held.items() if " at " not in name),
            "host planned": away,
        }


def waited(one: Stepper) -> float:
    homes = one.context.placed.homes
    return homes.waited.seconds if homes else 0.0


def largest(place: Place) -> dict[str, Any]:
    """The first model of the list that fits the card and the host."""
    room = place.pick((free_memory() or 0) - PROCESS, 1e15)
    card = place.pick(0, 10**15) or torch.cuda.mem_get_info(place.device)[0]
    lacking = []
    for name, words in LARGE:
        kept = Kept(preset(name), words, 4)
        layout = resolve(parse_layout(kept.words), None)
        size = Batch(micro_batch=kept.rows)
        plan = make_plan(kept.shape, layout, size, sequence=LENGTH, method=Method("bf16"))
        held = predicted_memory(for_gpus(plan), 0, packed=False)
        host = sum(count for name, count in held.items() if name.endswith("at host"))
        here = sum(count for name, count in held.items() if " at " not in name)
        if host <= room and here <= 0.95 * card:
            found = steps(place, kept, 1)
            return {"model": name, "layout": words} | found
        lacking.append(f"{name} {host / 1e9:.0f} GB of the host, {here / 1e9:.0f} of the card")
    raise Unavailable(f"there are {room / 1e9:.0f} GB of the host; wanted {'; '.join(lacking)}")


def deepspeed(place: Place) -> dict[str, Any]:
    """transformers' model under ZeRO stage 2 with its CPUAdam, bf16."""
    if place.cpu:
        raise Unavailable("bench/offload has DeepSpeed on a CPU")
    engine_of, model = imported("deepspeed"), llama(place)
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29742"}
    micros, rows = 2, RUNS["1b, optimizer=host"].rows
    settings = {
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": micros,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
        },
        "steps_per_print": 1_000_000,
    }
    engine, *_ = engine_of.initialize(model=model, config=settings)
    ids = tokens(place, model.config.vocab_size)[:rows].to(place.device)

    def step() -> None:
        for _ in range(micros):
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()

    step()
    begin(place)
    began = perf_counter()
    for _ in range(3):
        step()
    place.sync()
    took = (perf_counter() - began) / 3
    held = torch.cuda.max_memory_allocated(place.device)
    return {
        "tokens/s": rows * LENGTH * micros / took,
        "step ms": 1e3 * took,
        "allocated": held,
    }
