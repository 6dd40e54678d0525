"""Homes off the device beside DeepSpeed's ZeRO-Offload and ZeRO-Infinity, on one rank.

    python bench/offload/beside_deepspeed.py           deepspeed.md and deepspeed.json
    python bench/offload/beside_deepspeed.py --tiny    a small model and one repeat; writes nothing

Every contestant trains the same model from the same start on the same tokens, float32, AdamW on two
decay groups, clipped at 1; in a process of its own, because DeepSpeed has states for a process.
Repeats are rounds of all contestants. What an offload costs is its step beside that of the same
framework in memory.

    in memory   howdah `single`; DeepSpeed without ZeRO, torch's fused AdamW
    host        howdah `optimizer=host`, and all states; DeepSpeed ZeRO-2 with offload_optimizer on
                the CPU (ZeRO-Offload), ZeRO-3 with offload_param besides; its own CPUAdam
    disk        howdah `optimizer=disk`, and all states, through the page cache and past it;
                DeepSpeed ZeRO-3 with one and both on NVMe (ZeRO-Infinity), which needs libaio and
                its headers

A contestant that does not run here is named with its last line. DeepSpeed opens its files past the
page cache (O_DIRECT), always; so its rows are to be held beside those of howdah that do
(`storage.direct=true`). Without it howdah's files may stay in memory, as the sizes are.
"""

import argparse
import json
import logging
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[1] / "data_parallel"))

import quiet
import torch
from cases import RATE, SEED, Case, batch, method, model
from machine import machine
from peers import adamw, filled, tensors
from updates import ELEMENTS, TIMES, TINY, deepspeed_update, howdah_update, seconds_of

from howdah.comm.transport import SingleRank
from howdah.parallel.apply import apply
from howdah.parallel.flat_params import random_init
from howdah.parallel.mesh import connect_mesh
from howdah.plan.batch import Batch
from howdah.plan.layout import parse_layout
from howdah.plan.plan import make_plan
from howdah.plan.storage import Storage
from howdah.shapes.weights import weights
from howdah.text.batches import Micro
from howdah.train.step import StepContext, train_step

HERE = Path(__file__).resolve().parent
WARM_UP, STEPS, REPEATS = 2, 3, 3
TOLD = "result: "
LONGEST = 900  # seconds of a contestant in one round
EQUAL = 1e-4  # of a loss, by which contestants may differ

ALL = "weights={0} gradients={0} optimizer={0}"
CACHED, DIRECT = "page cache", "O_DIRECT"
HOWDAH = {
    "howdah, in memory": "",
    "howdah, optimizer=host": "optimizer=host",
    "howdah, all states on the host": ALL.format("host"),
    f"howdah, optimizer=disk, {CACHED}": "optimizer=disk",
    f"howdah, optimizer=disk, {DIRECT}": "optimizer=disk",
    f"howdah, all states on the disk, {CACHED}": ALL.format("disk"),
    f"howdah, all states on the disk, {DIRECT}": ALL.format("disk"),
}
CPU = {"device": "cpu", "pin_memory": False}
NVME = {"device": "nvme", "pin_memory": False}
DEEPSPEED: dict[str, dict[str, Any]] = {
    "DeepSpeed, in memory": {"stage": 0},
    "DeepSpeed, ZeRO-Offload": {"stage": 2, "offload_optimizer": CPU},
    "DeepSpeed, ZeRO-3, all on the CPU": {
        "stage": 3,
        "offload_optimizer": CPU,
        "offload_param": CPU,
    },
    f"DeepSpeed, ZeRO-Infinity, optimizer, {DIRECT}": {"stage": 3, "offload_optimizer": NVME},
    f"DeepSpeed, ZeRO-Infinity, {DIRECT}": {
        "stage": 3,
        "offload_optimizer": NVME,
        "offload_param": NVME,
    },
}
UPDATES = {
    "howdah, the update alone": howdah_update,
    "DeepSpeed, CPUAdam alone": deepspeed_update,
}
Step = Callable[[Sequence[Micro]], float]


def case_of(*, tiny: bool) -> Case:
    """12 layers of width 768 as in run.py, which are 91 million parameters."""
    shape = model(layers=2, width=64, ffn=96) if tiny else model(layers=12, width=768, ffn=2048)
    return Case("offload", shape, "float32", 64 if tiny else 256, 1, 1, STEPS, REPEATS, rows=4)


# -- contestants


def howdah_step(case: Case, name: str, folder: str) -> Step:
    layout, size = parse_layout(f"single x1 {HOWDAH[name]}"), Batch(case.rows, case.rows)
    made = make_plan(case.shape, layout, size, sequence=case.sequence, method=method(case))
    plan = replace(made, storage=Storage(folder=folder, direct=name.endswith(DIRECT)))
    mesh = connect_mesh(plan.layout, SingleRank(), torch.device("cpu"))
    placed = apply(plan, mesh=mesh, fill=random_init(weights(plan.shape), SEED))
    context, number = StepContext(placed, mesh, plan.method, seed=SEED), count()

    def step(micros: Sequence[Micro]) -> float:
        return train_step(context, micros, step=next(number), rate=RATE).loss

    return step


def deepspeed_step(case: Case, name: str, folder: str, *, own_adam: bool) -> Step:
    """With DeepSpeed's own loop; its CPUAdam is built at the first start, which takes minutes."""
    launched = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    launched |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29741"}
    os.environ |= launched | {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "1"}
    import deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    module, zero = filled(case), {**DEEPSPEED[name]}
    for key, home in zero.items():
        if key != "stage" and home["device"] == "nvme":
            zero[key] = {**home, "nvme_path": folder}
    optimizer: torch.optim.Optimizer = adamw(case, module.model)
    if zero["stage"] and own_adam:
        constants = method(case).optimizer
        optimizer = DeepSpeedCPUAdam(
            [{k: one[k] for k in ("params", "weight_decay")} for one in optimizer.param_groups],
            lr=RATE,
            betas=constants.betas,
            eps=constants.epsilon,
        )
    settings = {
        "train_micro_batch_size_per_gpu": case.rows,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": method(case).grad_clip,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": own_adam,
        "aio": {"block_size": 1 << 20, "queue_depth": 8, "overlap_events": True},
        "steps_per_print": 1_000_000,
    }
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=settings)

    def step(micros: Sequence[Micro]) -> float:
        loss = engine(*tensors(micros[0]))
        engine.backward(loss)
        engine.step()
        return float(loss.item())

    return step


# -- measuring


def one(name: str, folder: str, *, tiny: bool, own_adam: bool) -> dict[str, Any]:
    """The seconds and losses of a contestant, or the seconds of an update, in this process."""
    if name in UPDATES:
        os.environ["DS_ACCELERATOR"] = "cpu"
        update, times = UPDATES[name](TINY if tiny else ELEMENTS), 3 if tiny else TIMES
        return {"seconds": seconds_of(update, times=times)}
    case = case_of(tiny=tiny)
    pool = [batch(case, step=number, rank=0) for number in range(WARM_UP + STEPS)]
    theirs = partial(deepspeed_step, own_adam=own_adam)
    step = (howdah_step if name in HOWDAH else theirs)(case, name, folder)
    seconds, losses = [], []
    for micros in pool:
        began = perf_counter()
        losses.append(step(micros))
        seconds.append(perf_counter() - began)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": seconds[WARM_UP:], "losses": losses, "resident": most}


def started(name: str, folder: str, *, tiny: bool, own_adam: bool = True) -> dict[str, Any]:
    """The same in a process of its own; why not, where it ends otherwise."""
    words = [sys.executable, __file__, "--one", name, "--folder", folder]
    words += [*(["--tiny"] if tiny else []), *([] if own_adam else ["--torch-adam"])]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=LONGEST)
    except subprocess.TimeoutExpired:
        return {"failed": f"took longer than {LONGEST} s"}
    told = [line for line in done.stdout.splitlines() if line.startswith(TOLD)]
    if done.returncode or not told:
        last = (done.stderr.strip() or done.stdout.strip() or "nothing was said").splitlines()[-1]
        return {"failed": last[:200]}
    found: dict[str, Any] = json.loads(told[-1].removeprefix(TOLD))
    return found


def summary(rounds: Sequence[dict[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """A row for each contestant: seconds of a step (the median over all rounds), beside those of
    its framework in memory; whether its losses are those of howdah in memory.
    """
    wanted, rows = rounds[0]["howdah, in memory"]["losses"], []
    alone: dict[str, float] = {}
    for name in [one for one in rounds[0] if one not in UPDATES]:
        if failed := [each[name]["failed"] for each in rounds if "failed" in each[name]]:
            rows.append({"name": name, "failed": failed[0]})
            continue
        took = median(second for each in rounds for second in each[name]["seconds"])
        framework = name.partition(",")[0]
        alone.setdefault(framework, took)
        losses = rounds[0][name]["losses"]
        far = max(abs(a - b) / abs(b) for a, b in zip(losses, wanted, strict=True))
        resident = max(each[name]["resident"] for each in rounds)
        rows.append({"name": name, "seconds": took, "slowdown": took / alone[framework]})
        rows[-1] |= {"resident": resident, "losses": losses, "equal": far <= EQUAL}
    return rows


def updates(rounds: Sequence[dict[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """A row for each update without passes: the median of its seconds."""
    rows = []
    for name in [one for one in rounds[0] if one in UPDATES]:
        failed = [each[name]["failed"] for each in rounds if "failed" in each[name]]
        took = [second for each in rounds for second in each[name].get("seconds", ())]
        rows.append(
            {"name": name} | ({"failed": failed[0]} if failed else {"seconds": median(took)})
        )
    return rows


def markdown(about: str, rows: Sequence[dict[str, Any]], alone: Sequence[dict[str, Any]]) -> str:
    lines = ["# Homes beside DeepSpeed: results", "", about, ""]
    lines += [
        "| contestant | seconds a step | beside its framework in memory | resident, MB | losses |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        if "failed" in row:
            lines.append(f"| {row['name']} | does not run here: {row['failed']} | | | |")
            continue
        told = "equal" if row["equal"] else "differ"
        lines.append(
            f"| {row['name']} | {row['seconds']:.3f} | {row['slowdown']:.2f} "
            f"| {row['resident'] / 1e6:,.0f} | {told} |"
        )
    lines += ["", f"The update of {ELEMENTS:,} elements without passes:", ""]
    for row in alone:
        told = f"{row['seconds'] * 1e3:.1f} ms" if "seconds" in row else row["failed"]
        lines.append(f"- {row['name'].removesuffix(' alone')}: {told}")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="a small model; writes nothing")
    parser.add_argument("--folder", default="", help="on the disk that is used; not a tmpfs")
    parser.add_argument("--torch-adam", action="store_true", help="for DeepSpeed; nothing is built")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    quiet.add_option(parser)
    words = parser.parse_args()
    torch.set_num_threads(1 if words.tiny else len(os.sched_getaffinity(0)))
    if words.one:
        how = {"tiny": words.tiny, "own_adam": not words.torch_adam}
        print(TOLD + json.dumps(one(words.one, words.folder, **how)), flush=True)
        os._exit(0)  # threads of both frameworks may still be there
    watch = quiet.Watch(writes=not words.tiny, loaded=words.loaded)
    there = find_spec("deepspeed")
    names = [*HOWDAH, *(DEEPSPEED if there else ()), *(UPDATES if there else ())]
    rounds = []
    with TemporaryDirectory(dir=words.folder or None) as folder:
        for _ in range(1 if words.tiny else REPEATS):
            how = {"tiny": words.tiny, "own_adam": not words.torch_adam}
            rounds.append({name: started(name, folder, **how) for name in names})
            print(".", end="", file=sys.stderr, flush=True)
    rows, alone, noise = summary(rounds), updates(rounds), watch.end()
    about = f"{machine(torch.get_num_threads())} {quiet.sentence(noise)}"
    text = markdown(about, rows, alone)
    print(text)
    if not words.tiny:
        results = {"machine": about, "noise": noise, "rows": rows, "updates": alone}
        (HERE / "deepspeed.md").write_text(text, encoding="utf-8")
        (HERE / "deepspeed.json").write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
