"""The peak flop/s that `mfu` divides by: one number for a machine.

An accelerator that a shipped cluster names has it from its data sheet (`machines/cards.py`).
Otherwise it is measured: the best of many products of random matrices, of which the first, the
second or none is transposed: the products of a linear layer's backward and forward passes, whose
speeds differ up to 15 times in bf16 on a CPU without instructions for it. Of matrices of ones a
card draws less power, and keeps a higher clock than in training. What a measurement finds depends
on what else runs at that moment, so it is made once and kept in howdah's cache, in a file for each
combination of the facts that it depends on:

    CACHE/peaks/bfloat16-1-9f0c2a51.json    {"facts": {...}, "flops": 1.4e12, "share": 0.99}

All runs on a machine then divide by the same number, until `howdah doctor --measure` replaces it.
Only a number that was measured on a busy machine, which is too low, gives way to a higher one: each
run measures it again. So is a file that is damaged, or that other users can write. Where nothing
can be kept, each run has a number of its own.
"""

import fcntl
import json
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter, process_time
from typing import Annotated, Literal, NamedTuple, get_args

import torch

from howdah.base.atomic import write_text
from howdah.base.bounds import Bound
from howdah.base.errors import UserError, named
from howdah.base.files import parse_json, read_file
from howdah.base.tables import read_table
from howdah.host.facts import cpu_model, usable_cores
from howdah.machines.cards import device_named

RATES = {"bfloat16": "bf16", "float32": "float32", "float64": "float64"}  # by torch's names
FOLDER = "peaks"
SIZES = {"cpu": (512, 1024, 2048), "cuda": (8192,)}  # of the square matrices
SECONDS = 0.1  # for the products of one size, of which there are at least LEAST, if not for LONG
LEAST, LONG = 3, 0.3
# The least shares of its threads' time that an undisturbed measurement gets. Of short products in
# bf16, several threads compute for two thirds of the time alone.
BUSY, BUSY_TOGETHER = 0.9, 0.6
Turned = Literal["", "first", "second"]  # which matrix of a product is transposed
TURNED: tuple[Turned, ...] = get_args(Turned)
PRECISIONS = (torch.float32, torch.bfloat16)  # of runs, mostly
OTHERS = 0o022  # may write


@dataclass(frozen=True)
class Facts:
    """What a peak depends on.

    model      of the CPU or the accelerator
    vectors    the vector instructions that torch uses; of an accelerator its CUDA version
    cores      that a process may use; 0 for an accelerator
    threads    that torch uses; 0 for an accelerator
    precision  the name of a torch dtype
    torch      its version
    """

    model: str
    vectors: str
    cores: int
    threads: int
    precision: str
    torch: str


class Peak(NamedTuple):
    """Flop/s, and a text that names the source of the number."""

    flops: float
    source: str


@dataclass(frozen=True)
class Measured:
    """A measurement. `share` is the part of its threads' time that the process got; if it
    is `disturbed`, other programs took the rest, and the number is too low.
    """

    facts: Facts
    flops: Annotated[float, Bound(0, 1e24, above=True)]
    size: Annotated[int, Bound(1, 1 << 20)]
    share: Annotated[float, Bound(0, 1)]

    @property
    def source(self) -> str:
        if not self.facts.cores:
            return f"measured {self.size}³ product of random matrices: no data sheet of this card"
        return f"measured {self.size}³ matrix product{' on a busy machine' * self.disturbed}"

    @property
    def disturbed(self) -> bool:
        return self.share < (BUSY if self.facts.threads < 2 else BUSY_TOGETHER)


def facts_of(device: torch.device, dtype: torch.dtype, threads: int) -> Facts:
    """The facts of this machine on which the peak of `dtype` with so many threads depends."""
    precision, version = str(dtype).removeprefix("torch."), str(torch.__version__)
    if device.type == "cuda":
        name, cuda = torch.cuda.get_device_name(device), f"CUDA {torch.version.cuda}"
        return Facts(name, cuda, 0, 0, precision, version)
    vectors = torch.backends.cpu.get_cpu_capability()
    return Facts(cpu_model(), vectors, usable_cores(), threads, precision, version)


def data_sheet(facts: Facts) -> Peak | None:
    """The peak of the data sheet; None for a CPU, and where none is known."""
    device = None if facts.cores else device_named(facts.model)
    rate = RATES.get(facts.precision, "")
    flops = getattr(device.flops, rate, None) if device else None
    return Peak(flops, f"{facts.model} data sheet, dense {rate}") if flops else None


def peak_flops(
    device: torch.device,
    dtype: torch.dtype,
    *,
    threads: int,
    cache: Path,
    say: Callable[[str], None],
) -> Peak:
    """The peak of this machine: of the data sheet, or as it was measured by the first call that was
    not disturbed.
    """
    facts = facts_of(device, dtype, threads)
    if known := data_sheet(facts):
        return known
    path = cache / FOLDER / file_name(facts)
    with _alone_in(path.parent):
        before = None
        try:
            before = read(path, facts)
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as why:
            said = why.strerror if isinstance(why, OSError) else why
            say(f"peak        {named(path)} is not used ({said}); it is measured again")
        if before and not before.disturbed:
            return Peak(before.flops, before.source)
        found = measure(facts, device)
        if before and found.disturbed:  # both are too low
            found = max(before, found, key=lambda one: one.flops)
        with suppress(OSError):
            keep(path, found)
            return Peak(found.flops, found.source)
        return Peak(found.flops, f"{found.source}, by this run alone")


# -- measuring -----------------------------------------------------------------


def measure(facts: Facts, device: torch.device) -> Measured:
    """The best of many matrix products, in this process. Takes a second or two: larger matrices are
    left out where one product takes long, as in bf16 on processors that do not know it.
    """
    before, began, busy = torch.get_num_threads(), perf_counter(), process_time()
    torch.set_num_threads(facts.threads or before)
    try:
        best = 0.0, 0
        for turned in TURNED:
            for size in SIZES[device.type]:
                flops = _products(facts.precision, size, device, turned=turned)
                best = max(best, (flops, size))
                if 2 * size**3 / flops > SECONDS:
                    break
    finally:
        torch.set_num_threads(before)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the matrices' memory is for the model
    passed, busy = perf_counter() - began, process_time() - busy
    share = min(busy / (passed * facts.threads), 1.0) if facts.threads else 1.0
    return Measured(facts, *best, share=round(share, 3))


def _products(precision: str, size: int, device: torch.device, *, turned: Turned) -> float:
    """Flop/s of the best product of two square matrices of random numbers, one of them `turned`.
    They have a generator of their own: what a run draws afterwards does not depend on whether it
    has measured.
    """
    draw = torch.Generator(device).manual_seed(0)
    dtype, seconds = getattr(torch, precision), [0.0]
    matrix = torch.randn(size, size, generator=draw, dtype=dtype, device=device)
    first = matrix.T if turned == "first" else matrix
    second = matrix.T if turned == "second" else matrix
    while sum(seconds) < (SECONDS if len(seconds) > LEAST else LONG):
        began = perf_counter()
        first @ second
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(perf_counter() - began)
    return float(2 * size**3 / min(seconds[1:]))


# -- keeping -------------------------------------------------------------------


def file_name(facts: Facts) -> str:
    """The name of the file for a measurement, with a checksum of all its facts."""
    checksum = zlib.crc32(json.dumps(asdict(facts)).encode())
    return f"{facts.precision}-{facts.threads}-{checksum:08x}.json"


def read(path: Path, facts: Facts | None = None) -> Measured:
    """A measurement that was kept. Raises OSError, and ValueError for a file that is damaged, of
    other facts, or open to other users.
    """
    data, status = read_file(path), path.stat()
    if status.st_uid not in (os.geteuid(), 0) or status.st_mode & OTHERS:
        raise ValueError("other users can write it")
    if not isinstance(table := parse_json(data), dict):
        raise ValueError("it is no table")
    found, problems = read_table(Measured, table, limits=True)
    if not problems and facts not in (None, found.facts):
        problems = ["it is of another machine"]
    if problems:
        raise ValueError(problems[0])
    return found


def keep(path: Path, found: Measured) -> None:
    """Writes a measurement. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_text(path, json.dumps(asdict(found), indent=1) + "\n")
    path.chmod(0o644)  # whatever the umask: open to others, it would not be believed


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Holds the lock of the folder, where there can be one: of two runs that start together, one
    measures, and the other reads.
    """
    handle = None
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)


# -- for `howdah doctor` -------------------------------------------------------


def kept(cache: Path, here: Facts) -> list[Measured]:
    """The measurements of the machine `here`, for all precisions and numbers of threads."""
    found = []
    for path in sorted((cache / FOLDER).glob("*.json")):
        with suppress(OSError, ValueError):
            found.append(read(path))
    threads, precision = here.threads, here.precision
    same = (replace(one.facts, threads=threads, precision=precision) == here for one in found)
    return [one for one, wanted in zip(found, same, strict=True) if wanted]


def measure_again(device: torch.device, cache: Path) -> None:
    """Measures what is kept of this machine again, and PRECISIONS with one thread and on all cores.

    Raises UserError where the results cannot be kept.
    """
    counts = (0,) if device.type == "cuda" else (1, usable_cores())
    wanted = {facts_of(device, dtype, threads) for dtype in PRECISIONS for threads in counts}
    wanted |= {one.facts for one in kept(cache, next(iter(wanted)))}
    folder = cache / FOLDER
    try:
        for facts in sorted(wanted, key=str):
            if data_sheet(facts) is None:
                with _alone_in(folder):
                    keep(folder / file_name(facts), measure(facts, device))
    except OSError as why:
        raise UserError(
            f"what is measured cannot be kept in {named(folder)} ({why.strerror}): set "
            "HOWDAH_CACHE to a folder that can be written"
        ) from None
