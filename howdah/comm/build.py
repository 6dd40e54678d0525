"""Building the engine: plain C, made into a library by the machine's own compiler.

    a compiler here         compiled once for this very processor, and kept in CACHE/engine
    none, built at install  the library beside this file, for any processor of its kind
    neither                 NoCompiler: the caller takes gloo

The name in the cache is a hash of all that decides what the library does: source, flags, compiler
and processor. Ranks that start together find one of them compiling and wait for it, by a lock
that the kernel opens when its holder ends. A library appears under its name when it is complete.

To load a library is to run what it holds. So the folder is this user's, and closed to others; so is
the file; and what is loaded is the descriptor that was looked at, not a name that may be another
file by then. What lies in a folder that was open to others is compiled anew.
"""

import errno
import fcntl
import hashlib
import os
import shutil
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from howdah.comm.settings import Settings

HERE = Path(__file__).parent
SOURCES = (HERE / "engine.c", HERE / "engine_reduce.h")
# No fused multiply-add and no reordering: the bits of a sum do not depend on the processor.
# Integers wrap, as torch's do.
OTHERS = 0o022  # in a mode: the group and all others may write
FLAGS = ("-O3", "-std=gnu11", "-ffp-contract=off", "-fwrapv", "-fPIC", "-shared", "-pthread")


class NoCompiler(Exception):
    """The engine cannot be had on this machine; one sentence that says why."""


class NotThere(NoCompiler):
    """There is no library that only this user could have written: it is to be compiled."""


def engine_library(settings: Settings) -> Path:
    """The compiled engine, made now if it is not there. Raises NoCompiler."""
    compiler = shutil.which(settings.compiler[0])
    if compiler is None:
        found = _installed(settings.compiler[0])
        os.close(open_library(found))
        return found
    command = [compiler, *settings.compiler[1:], *FLAGS, "-march=native"]
    try:
        target = settings.cache / "engine" / f"engine-{_key(command)}.so"
        with suppress(NotThere):
            os.close(open_library(target))
            return target
        settings.cache.mkdir(parents=True, exist_ok=True)
        with _alone_in(target.parent):
            if not target.exists():
                _compile(command, target)
        os.close(open_library(target))
    except OSError as error:
        raise NoCompiler(f"the engine cannot be kept in {settings.cache}: {error}") from error
    return target


def open_library(path: Path) -> int:
    """A descriptor of a library that nobody else could have written. Raises NoCompiler.

    The one beside this file may be root's, who installed it; what else lies there is run as well.
    """
    installed = path.parent == HERE
    if not installed:
        folder = _open_folder(path.parent)
        mode = os.fstat(folder).st_mode
        if mode & OTHERS:
            os.close(folder)
            raise NotThere(f"{path.parent} is open to others")
    else:
        folder = os.open(HERE, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe would wait
        file = os.open(path.name, flags, dir_fd=folder)
    except FileNotFoundError:
        raise NotThere(f"there is no {path}") from None
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO):  # a link, a socket
            raise
        raise NoCompiler(f"{path} is not loaded, for it is no file") from None
    finally:
        os.close(folder)
    found = os.fstat(file)
    owners = (os.geteuid(), 0) if installed else (os.geteuid(),)
    others = stat.S_IWOTH if installed else OTHERS
    if found.st_uid in owners and stat.S_ISREG(found.st_mode) and not found.st_mode & others:
        return file
    os.close(file)
    raise NoCompiler(f"{path} is not loaded, for others could have written it: remove it")


def _open_folder(folder: Path) -> int:
    """A descriptor of a folder of this user's, and not of a link to one. Raises NoCompiler."""
    try:
        inside = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise NotThere(f"there is no {folder}") from None
    owner = os.fstat(inside).st_uid
    if owner == os.geteuid():
        return inside
    os.close(inside)
    raise NoCompiler(
        f"nothing is loaded from {folder}, for it belongs to user {owner}: remove it, or name a "
        "folder of your own as HOWDAH_CACHE"
    )


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """The folder is closed to other users, and this process alone compiles in it."""
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    inside = _open_folder(folder)
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        lock = os.open("lock", flags, 0o600, dir_fd=inside)
        try:
            if os.fstat(lock).st_uid != os.geteuid():  # and may be held for ever
                raise NoCompiler(f"{folder} holds the lock of another user: remove the folder")
            fcntl.flock(lock, fcntl.LOCK_EX)
            _clear(inside)
            yield
        finally:
            os.close(lock)
    finally:
        os.close(inside)


def _clear(folder: int) -> None:
    """Closes it to others. What may be theirs goes, and what somebody left who was killed here."""
    mode = os.fstat(folder).st_mode
    if mode & 0o077:
        os.fchmod(folder, 0o700)
    for name in set(os.listdir(folder)) - {"lock"}:
        if stat.S_ISDIR(os.lstat(name, dir_fd=folder).st_mode):
            shutil.rmtree(name, ignore_errors=True, dir_fd=folder)
        elif mode & OTHERS or not name.endswith(".so"):
            os.unlink(name, dir_fd=folder)


def _installed(compiler: str) -> Path:
    for path in HERE.glob("_engine*.so"):
        return path
    raise NoCompiler(
        f"there is no C compiler ({compiler}) to build the engine with: install gcc or clang"
    )


def _compile(command: list[str], target: Path) -> None:
    made = target.with_suffix(f".{os.getpid()}")
    # The compiler's own files lie where they go away when it is broken off, by a signal say.
    with TemporaryDirectory(dir=target.parent) as place:
        result = subprocess.run(
            ["env", f"TMPDIR={place}", *command, "-o", made, SOURCES[0]],
            capture_output=True,
            text=True,
            check=False,
        )
    if result.returncode:
        made.unlink(missing_ok=True)
        said = (result.stderr.strip().splitlines() or ["nothing"])[0]
        raise NoCompiler(f"{command[0]} cannot build the engine; it says: {said}")
    made.chmod(0o700)  # whatever the umask is
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
