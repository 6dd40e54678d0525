"""Building the engine: plain C, made into a library by the machine's own compiler.

    a compiler here         compiled once for this very processor, and kept in the cache
    none, built at install  the library beside this file, for any processor of its kind
    neither                 NoCompiler: the caller takes the fallback

The name in the cache is a hash of all that decides what the library does: source, flags, compiler
and processor. Ranks that start together find one of them compiling and wait for it, by a lock
that the kernel opens when its holder ends. A library appears under its name when it is complete.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from howdah.comm.settings import Settings

HERE = Path(__file__).parent
SOURCES = (HERE / "engine.c", HERE / "engine_reduce.h")
# No fused multiply-add and no reordering: the bits of a sum do not depend on the processor.
# Integers wrap, as torch's do.
FLAGS = ("-O3", "-std=gnu11", "-ffp-contract=off", "-fwrapv", "-fPIC", "-shared", "-pthread")


class NoCompiler(Exception):
    """The engine cannot be had on this machine; one sentence that says why."""


def engine_library(settings: Settings) -> Path:
    """The compiled engine, made now if it is not there. Raises NoCompiler."""
    compiler = shutil.which(settings.compiler[0])
    if compiler is None:
        return _installed(settings.compiler[0])
    command = [compiler, *settings.compiler[1:], *FLAGS, "-march=native"]
    target = settings.cache / f"engine-{_key(command)}.so"
    if target.exists():
        return target
    try:
        settings.cache.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_suffix(".lock")):
            if not target.exists():
                _compile(command, target)
    except OSError as error:
        raise NoCompiler(f"the engine cannot be kept in {settings.cache}: {error}") from error
    return target


def _installed(compiler: str) -> Path:
    for path in HERE.glob("_engine*.so"):
        return path
    raise NoCompiler(
        f"there is no C compiler ({compiler}) to build the engine with: install gcc or clang"
    )


def _compile(command: list[str], target: Path) -> None:
    made = target.with_suffix(f".{os.getpid()}")
    result = subprocess.run(
        [*command, "-o", made, SOURCES[0]], capture_output=True, text=True, check=False
    )
    if result.returncode:
        made.unlink(missing_ok=True)
        said = (result.stderr.strip().splitlines() or ["nothing"])[0]
        raise NoCompiler(f"{command[0]} cannot build the engine; it says: {said}")
    made.rename(target)


def _key(command: list[str]) -> str:
    found = hashlib.sha256("\0".join(command).encode())
    for source in SOURCES:
        found.update(source.read_bytes())
    found.update(_processor())
    return found.hexdigest()[:16]


def _processor() -> bytes:
    """What -march=native looks at: the lines that are the same for every core."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return b""
    telling = (b"model name", b"flags", b"Features", b"CPU part")
    return b"\n".join(sorted({line for line in lines if line.startswith(telling)}))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
