"""Builds a wheel of howdah with the engine inside, for machines that have no C compiler.

    python tools/wheel.py FOLDER    prints the path of the wheel

The engine is a plain shared library that needs the C library alone, so one wheel serves every
version of Python. Its tag names the oldest C library that has all the symbols it needs, as PEP 600
defines: `py3-none-manylinux_2_17_x86_64` runs wherever glibc is 2.17 or newer. Exit code 1 where
this machine cannot build the engine, or where it needs more than the C library.
"""

import platform
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
FILES = ("pyproject.toml", "README.md", "LICENSE")
ENGINE = re.compile(r"howdah/comm/_engine.*\.so")
ALLOWED = {"libc.so.6", "libpthread.so.0", "libm.so.6"}  # all of them are glibc's


def main() -> None:
    """Builds, looks into what was built, and gives it its tag."""
    folder = Path(sys.argv[1]).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    with TemporaryDirectory() as copy:  # setuptools would add what an earlier build left behind
        for name in FILES:
            shutil.copy(ROOT / name, copy)
        made = shutil.ignore_patterns("__pycache__", "*.so")
        shutil.copytree(ROOT / "howdah", Path(copy) / "howdah", ignore=made)
        subprocess.run([*pip, "--wheel-dir", folder, copy], check=True, stdout=sys.stderr)
    (built,) = folder.glob("howdah-*-linux_*.whl")
    tag = tag_of(engine_in(built))
    words = ["--remove", "--python-tag", "py3", "--abi-tag", "none", "--platform-tag", tag]
    command = [sys.executable, "-m", "wheel", "tags", *words, built]
    tagged = subprocess.run(command, check=True, capture_output=True, text=True)
    print(folder / tagged.stdout.strip())


def engine_in(wheel: Path) -> bytes:
    """The engine's library in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ENGINE.fullmatch(name)]
        if len(names) != 1:
            sys.exit("the wheel holds no engine: install a C compiler (gcc or clang), then again")
        return archive.read(names[0])


def tag_of(library: bytes) -> str:
    """The platform tag of PEP 600 for a shared library, from the names that it asks for."""
    needed = {name.decode() for name in re.findall(rb"\0(lib[\w.+-]+\.so[\w.]*)(?=\0)", library)}
    if others := needed - ALLOWED:
        sys.exit(f"the engine needs {', '.join(sorted(others))}, which not every machine has")
    versions = re.findall(rb"GLIBC_(\d+)\.(\d+)", library)
    major, minor = max((int(major), int(minor)) for major, minor in versions)
    return f"manylinux_{major}_{max(minor, 5)}_{platform.machine()}"


if __name__ == "__main__":
    main()
