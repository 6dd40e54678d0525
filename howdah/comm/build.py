"""Builds the engine: plain C, compiled to a shared library by the machine's own compiler.

    a compiler here         compiled once for this very processor, and kept in CACHE/engine
    none, built at install  the library beside this file, for any processor of its kind
    neither                 NoCompiler: the caller takes gloo

The file name in the cache is a hash of everything that determines the library: source, flags,
compiler and processor. When ranks start together, one of them compiles and the others wait for it:
the kernel releases its lock when it ends. A library gets its file name when it is complete, and a
checksum at its end; one that a disk has damaged is compiled again.

Loading a library runs its code. So the folder and the file must belong to this user and be closed
to others. The library is loaded through the descriptor that was checked, not by its name, which
could refer to another file by then. If the folder was open to others, its libraries are compiled
again.
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
from zlib import crc32

from howdah.comm.settings import Settings

HERE = Path(__file__).parent
SOURCES = (
    *(HERE / name for name in ("engine.c", "engine_reduce.h", "engine_crc.h", "engine_blocks.h")),
    HERE.parent / "host" / "ring.c",
)
# The flags: no fused multiply-add and no reordering, so the bits of a sum do not depend on the
# processor. Integers wrap around on overflow, as those of torch do.
SUM = 4  # bytes of the checksum at the end of a file
OTHERS = 0o022  # mode bits by which the group and all others may write
FLAGS = ("-O3", "-std=gnu11", "-ffp-contract=off", "-fwrapv", "-fPIC", "-shared", "-pthread")


class NoCompiler(Exception):
    """The engine is not available on this machine; the message is one sentence with the reason."""


class NotThere(NoCompiler):
    """No library exists that only this user could have written, so it must be compiled."""


def engine_library(settings: Settings, *, build: bool = True) -> Path:
    """The path of the engine's library. Raises NoCompiler.

    build  compile it first if it is missing
    """
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
        if not build:
            raise NotThere(f"there is no {target}")
        settings.cache.mkdir(parents=True, exist_ok=True)
        with _alone_in(target.parent):
            try:
                os.close(open_library(target))
            except NotThere:
                _compile(command, target)
        os.close(open_library(target))
    except OSError as error:
        raise NoCompiler(f"the engine cannot be kept in {settings.cache}: {error}") from error
    return target


def open_library(path: Path) -> int:
    """A descriptor of a library that no other user could have written. Raises NoCompiler.

    The library beside this file may also belong to root, who installed it: the Python modules of
    its folder are trusted too, because they run in this process.
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
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe could block
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
        if installed or _is_whole(file, found.st_size):
            return file
        os.close(file)
        raise NotThere(f"{path} is damaged")
    os.close(file)
    raise NoCompiler(f"{path} is not loaded, for others could have written it: remove it")


def _is_whole(file: int, size: int) -> bool:
    """Whether a library ends with the checksum of what is before it: one that was cut off would end
    the process that uses it, by SIGBUS.
    """
    data = os.pread(file, size, 0)
    return size > SUM and crc32(data[:-SUM]) == int.from_bytes(data[-SUM:], "little")


def _open_folder(folder: Path) -> int:
    """A descriptor of a folder that belongs to this user and is no link. Raises NoCompiler."""
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
    """While the block runs, `folder` exists, is closed to other users, and is locked, so that only
    this process compiles in it. Raises NoCompiler.
    """
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    inside = _open_folder(folder)
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        lock = os.open("lock", flags, 0o600, dir_fd=inside)
        try:
            if os.fstat(lock).st_uid != os.geteuid():  # who may hold it forever
                raise NoCompiler(f"{folder} holds the lock of another user: remove the folder")
            fcntl.flock(lock, fcntl.LOCK_EX)
            _clear(inside)
            yield
        finally:
            os.close(lock)
    finally:
        os.close(inside)


def _clear(folder: int) -> None:
    """Closes a folder to other users, and removes files that they could have written, and the
    leftovers of processes that were killed while they compiled.
    """
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
    compiled = [source for source in SOURCES if source.suffix == ".c"]
    # The compiler's temporary files are in a folder that is removed if a signal interrupts it.
    with TemporaryDirectory(dir=target.parent) as folder:
        result = subprocess.run(
            ["env", f"TMPDIR={folder}", *command, "-o", made, *compiled],
            capture_output=True,
            text=True,
            check=False,
        )
    if result.returncode:
        made.unlink(missing_ok=True)
        said = (result.stderr.strip().splitlines() or ["nothing"])[0]
        raise NoCompiler(f"{command[0]} cannot build the engine; it says: {said}")
    with made.open("ab") as file:
        file.write(crc32(made.read_bytes()).to_bytes(SUM, "little"))
    made.chmod(0o700)  # independent of the umask
    made.rename(target)


def _key(command: list[str]) -> str:
    found = hashlib.sha256("\0".join(command).encode())
    for source in SOURCES:
        found.update(source.read_bytes())
    found.update(_processor())
    return found.hexdigest()[:16]


def _processor() -> bytes:
    """The lines of /proc/cpuinfo on which -march=native depends; each distinct line once."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return b""
    telling = (b"model name", b"flags", b"Features", b"CPU part")
    return b"\n".join(sorted({line for line in lines if line.startswith(telling)}))
