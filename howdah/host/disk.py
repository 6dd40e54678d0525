"""How fast the disk of a folder takes a file and gives it back."""

import os
from pathlib import Path
from time import perf_counter


def disk_seconds(folder: Path, size: int) -> tuple[float, float]:
    """Seconds of writing `size` bytes to a new file until they are on the disk, and of reading them
    back, where the system can be asked to forget them. The file is removed. Raises OSError.
    """
    path = folder / f".measure-{os.getpid()}"
    content = os.urandom(1 << 20)
    try:
        began = perf_counter()
        with path.open("wb", buffering=0) as file:
            for _ in range(-(-size // len(content))):
                file.write(content)
            os.fsync(file.fileno())
            written = perf_counter()
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        opened = perf_counter()
        with path.open("rb", buffering=0) as file:
            while file.read(len(content)):
                pass
        return written - began, perf_counter() - opened
    finally:
        path.unlink(missing_ok=True)
