"""The wheel: installed without a compiler, it brings the engine."""

import os
import site
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "wheel.py", folder],
        check=True,
        capture_output=True,
        text=True,
    )
    return Path(done.stdout.strip())


@pytest.mark.slow
def test_a_wheel_serves_all_pythons_and_old_systems(wheel):
    """The tag of Debian 8 or CentOS 7; the engine lies inside."""
    assert "-py3-none-manylinux_2_17_" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        assert any("comm/_engine" in name for name in archive.namelist())
        assert "howdah/config/recipes/laptop.toml" in archive.namelist()


@pytest.mark.slow
def test_without_a_compiler_the_wheel_s_engine_is_used(wheel, tmp_path):
    """In a bare environment, which takes torch from this one and finds no compiler anywhere."""
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", bare], check=True)
    (place,) = bare.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(place)
    environment = {
        "PATH": str(bare / "bin"),
        "HOME": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(site.getsitepackages()),
    }
    python = bare / "bin" / "python"
    where = [python, "-c", "import howdah; print(howdah.__file__)"]
    kwargs = {"env": environment, "cwd": tmp_path, "capture_output": True, "text": True}
    assert str(place) in subprocess.run(where, check=True, **kwargs).stdout
    shipped = [python, "-m", "howdah", "check", "laptop", "--force"]
    assert subprocess.run(shipped, check=True, **kwargs).stdout.startswith("laptop: sound: ")
    words = ["bench", "collectives", "--transport", "engine", "--sizes", "64", "--repeats", "1"]
    done = subprocess.run([python, "-m", "howdah", *words], check=False, **kwargs)
    assert done.returncode == 0, done.stderr
    assert "engine" in done.stdout
    assert list(tmp_path.glob(".cache/howdah/engine/*.so")) == []  # nothing was compiled
