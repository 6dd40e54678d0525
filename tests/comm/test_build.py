"""Building the engine: once, whole, by one of many that start together; or a sentence why not."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from howdah.comm import build
from howdah.comm.build import NoCompiler, engine_library
from howdah.comm.settings import Settings, read_settings

CALLS = "#!/bin/sh\necho called >> {log}\nexec cc -O0 $(echo $@ | sed 's/-O3//')\n"


@pytest.fixture
def compiler(tmp_path):
    """A compiler that counts how often it is called."""
    path = tmp_path / "counting-cc"
    path.write_text(CALLS.format(log=tmp_path / "log"))
    path.chmod(0o755)
    return str(path)


def test_ranks_that_start_together_compile_once(tmp_path, compiler):
    settings = Settings((compiler,), tmp_path / "cache")
    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(lambda _: engine_library(settings), range(4)))
    assert len(found) == 1
    assert found.pop().stat().st_size > 10_000
    assert (tmp_path / "log").read_text() == "called\n"
    names = sorted(path.suffix for path in (tmp_path / "cache").iterdir())
    assert names == [".lock", ".so"]  # and nothing half made


def test_other_flags_and_another_source_are_another_library(tmp_path, compiler, monkeypatch):
    one = engine_library(Settings((compiler,), tmp_path))
    assert engine_library(Settings((compiler, "-DX"), tmp_path)) != one
    sources = [shutil.copy(source, tmp_path / source.name) for source in build.SOURCES]
    sources[1].write_text(sources[1].read_text() + "\n/* changed */\n")
    monkeypatch.setattr(build, "SOURCES", tuple(sources))
    assert engine_library(Settings((compiler,), tmp_path)) != one


def test_no_compiler_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "HERE", tmp_path)  # where nothing was installed
    with pytest.raises(NoCompiler, match=r"no C compiler \(no-such-cc\).*install gcc or clang"):
        engine_library(Settings(("no-such-cc",), tmp_path))


def test_without_a_compiler_the_installed_library_is_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "HERE", tmp_path)
    installed = tmp_path / "_engine.cpython-311.so"
    installed.touch()
    assert engine_library(Settings(("no-such-cc",), tmp_path)) == installed


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(tmp_path):
    broken = tmp_path / "broken-cc"
    broken.write_text("#!/bin/sh\necho it is broken >&2\nexit 3\n")
    broken.chmod(0o755)
    with pytest.raises(NoCompiler, match="cannot build the engine; it says: it is broken"):
        engine_library(Settings((str(broken),), tmp_path / "cache"))
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_a_cache_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(NoCompiler, match="cannot be kept in"):
        engine_library(Settings(("cc",), tmp_path / "file"))


def test_settings_come_from_the_environment(monkeypatch):
    for name in ("CC", "HOWDAH_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert read_settings() == Settings(("cc",), Path.home() / ".cache" / "howdah")
    monkeypatch.setenv("XDG_CACHE_HOME", "/there")
    monkeypatch.setenv("CC", "clang -m64")
    assert read_settings() == Settings(("clang", "-m64"), Path("/there/howdah"))
    monkeypatch.setenv("HOWDAH_CACHE", "/here")
    assert read_settings().cache == Path("/here/howdah")
