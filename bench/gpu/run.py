"""What a GPU can do with howdah, in at most ten minutes.

    make gpu                                        parts A to I; results.json and results.md here
    python bench/gpu/run.py --parts AE --minutes 3
    python bench/gpu/run.py --wheels FOLDER         packages that this Python lacks, for the peers
    python bench/gpu/run.py --cpu                   tiny sizes without a GPU; in build/gpu/cpu

Each part is a process with a deadline. results.json is written after each part, and has what a
part had found when it was ended. Parts that are not asked for keep what they found before on the
same card with the same torch. Without a GPU one sentence is said, and the exit code is 0.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from time import monotonic
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from part import MODULES
from rows import empty, write_json
from tables import page

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
KEPT = ROOT / "build" / "gpu"  # ignored by git: kernels of the compiler, packages, drafts
SLOWER = 20.0  # so much more time has a part on a CPU, which may be busy
STARTS = 15.0  # seconds beside the parts
SHORT = 12.0  # seconds in which no part would come to anything
# What howdah's commands set for torch where there is a GPU (`howdah/cli/environment.py`).
FOR_CARDS = {
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_FR_BUFFER_SIZE": "2000",
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
}
FACTS = "name,driver_version,memory.total,clocks.sm,clocks.max.sm,power.draw,temperature.gpu"


@dataclass(frozen=True)
class Part:
    """A part, and the seconds that it may take."""

    letter: str
    name: str
    seconds: float


PARTS = (  # in order of worth; together less than ten minutes
    Part("A", "ceilings", 25),
    Part("B", "the same numbers", 60),
    Part("C", "streams", 45),
    Part("E", "NCCL alone", 45),
    Part("H", "experts and sequences", 50),
    Part("F", "speed", 130),
    Part("I", "off the card", 110),
    Part("D", "ranks that share the card", 60),
    Part("G", "peers", 60),
)


def main(words: Sequence[str] | None = None) -> int:
    given = options(words)
    lack = "" if given.cpu else no_card()
    if lack:
        print(f"{lack}; nothing was measured (without a GPU: python bench/gpu/run.py --cpu)")
        return 0
    out = given.out or (KEPT / "cpu" if given.cpu else HERE)
    out.mkdir(parents=True, exist_ok=True)
    asked = shared_out([part for part in PARTS if part.letter in given.parts], given)
    until = monotonic() + sum(part.seconds for part in asked) + STARTS
    results: dict[str, Any] = {
        "command": " ".join(["bench/gpu/run.py", *(sys.argv[1:] if words is None else words)]),
        "machine": measured_on(cpu=given.cpu),
        "parts": {part.letter: not_started(part, "was not asked for") for part in PARTS},
    }
    results["parts"] |= earlier(out / "results.json", results["machine"])
    site = unpacked(given.wheels) if given.wheels else None
    for part in asked:
        found = run_part(part, command(part, given.cpu, site), out=out, until=until)
        results["parts"][part.letter] = found | {"card": None if given.cpu else card()}
        write_json(out / "results.json", results)
        (out / "results.md").write_text(page(results), "utf-8")
    print(f"written: {out / 'results.md'}")
    return 0


def options(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", default="".join(MODULES), help="letters, such as ABCE")
    parser.add_argument("--minutes", type=float, default=10.0, help="after which all is ended")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels for the peers")
    parser.add_argument("--out", type=Path, help="where results are written")
    parser.add_argument("--cpu", action="store_true", help="tiny sizes, without a GPU")
    given = parser.parse_args(words)
    if unknown := sorted({*given.parts.upper()} - {*MODULES}):
        parser.error(f"--parts: there is no part {unknown[0]}; there are {''.join(MODULES)}")
    if given.wheels and not [*given.wheels.glob("*.whl")]:
        parser.error(f"--wheels: {given.wheels} holds no wheel")
    given.parts = given.parts.upper()
    return given


def shared_out(asked: Sequence[Part], given: argparse.Namespace) -> list[Part]:
    """The parts with the time that there is: alone, one has all of it."""
    there = (60 * given.minutes - STARTS) * (SLOWER if given.cpu else 1.0)
    scale = max(there, 0.0) / max(sum(part.seconds for part in asked), 1.0)
    return [replace(part, seconds=part.seconds * scale) for part in asked]


def no_card() -> str:
    """Why there is no GPU to measure; empty if there is one."""
    from howdah.host.devices import find_cards

    return find_cards(os.environ.get("CUDA_VISIBLE_DEVICES")).lack.removesuffix("; use device=cpu")


# -- a part ----------------------------------------------------------------------------


def command(part: Part, cpu: bool, site: Path | None) -> list[str]:
    """What runs a part, without where it writes and until when."""
    more = ["--cpu"] * cpu + (["--site", str(site)] if site else [])
    return [sys.executable, str(HERE / "part.py"), part.letter, *more]


def run_part(part: Part, command: Sequence[str], *, out: Path, until: float) -> dict[str, Any]:
    """Runs a part in a process, at most for its seconds and until `until`; what came of it.

    state   done; out of time; failed, by its exit code; not started
    said    the end of what a part that failed wrote to its error stream
    """
    seconds = min(part.seconds, until - monotonic())
    if seconds < SHORT:
        return not_started(part, "no time was left")
    draft, heard = out / f"part-{part.letter}.json", out / f"part-{part.letter}.err"
    draft.unlink(missing_ok=True)
    print(f"-- {part.letter} {part.name}: at most {seconds:.0f} s", flush=True)
    began = monotonic()
    words = [*command, "--out", str(draft), "--seconds", f"{seconds:.1f}"]
    with heard.open("w") as errors:
        child = subprocess.Popen(words, stderr=errors, env=environment(), start_new_session=True)
        try:
            code = child.wait(seconds)
            state = "done" if code == 0 else f"failed, exit code {code}"
        except subprocess.TimeoutExpired:
            state = "out of time"
        finally:
            with suppress(ProcessLookupError):  # its workers are of its session
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    rows = rows_of(part, "the part ended before it wrote")
    with suppress(OSError, ValueError):
        rows |= json.loads(draft.read_text("utf-8"))
    said = heard.read_text("utf-8", "replace").strip()[-2000:] if state != "done" else ""
    for path in (draft, heard):
        path.unlink(missing_ok=True)
    taken = round(monotonic() - began, 1)
    return {"name": part.name, "state": state, "seconds": taken, "said": said, "rows": rows}


def not_started(part: Part, why: str) -> dict[str, Any]:
    """A part that was not run: it has the same keys."""
    rows = rows_of(part, why)
    return {"name": part.name, "state": why, "seconds": 0.0, "said": "", "rows": rows, "card": None}


def rows_of(part: Part, why: str) -> dict[str, dict[str, Any]]:
    """The rows of a part, not measured; none of one that this torch cannot load."""
    try:
        return empty(import_module(MODULES[part.letter]).ROWS, why)
    except (ImportError, AttributeError):
        return {}


def environment() -> dict[str, str]:
    """What a run of howdah sets for torch, and a folder where compiled kernels stay."""
    kept = {"TORCHINDUCTOR_CACHE_DIR": str(KEPT / "inductor"), "TOKENIZERS_PARALLELISM": "false"}
    return {**FOR_CARDS, **kept, "HF_HUB_OFFLINE": "1", **os.environ}


def unpacked(wheels: Path) -> Path:
    """The wheels of a folder as packages that Python finds behind its own."""
    site = KEPT / "site"
    shutil.rmtree(site, ignore_errors=True)
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
    return site


def earlier(path: Path, here: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of earlier results on the same card with the same torch."""
    try:
        found = json.loads(path.read_text("utf-8"))
        cards = [(one["card"] or {}).get("name") for one in (found["machine"], here)]
        same = cards[0] == cards[1] and all(
            found["machine"][key] == here[key] for key in ("torch", "cuda", "mode")
        )
        return {letter: found["parts"][letter] for letter in MODULES} if same else {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


# -- the machine -----------------------------------------------------------------------


def measured_on(*, cpu: bool) -> dict[str, Any]:
    """What was measured on, and how busy its processors were before."""
    import quiet
    import torch

    return {
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
        "mode": "cpu, tiny sizes" if cpu else "gpu",
        "card": None if cpu else card(),
        "others": round(quiet.others(0.5 if cpu else quiet.WINDOW), 3),
    }


def card() -> dict[str, str] | None:
    """Name, driver, clocks, power and temperature of the first GPU, now."""
    command = ["nvidia-smi", "-i", "0", f"--query-gpu={FACTS}", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return dict(zip(FACTS.split(","), map(str.strip, said.stdout.split(",")), strict=False))


if __name__ == "__main__":
    sys.exit(main())
