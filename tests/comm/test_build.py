"""Building the engine: once, whole, by one of many that start together; or a sentence why not."""

import os
import shutil
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from howdah.base.errors import UserError
from howdah.comm import build
from howdah.comm.build import NoCompiler, engine_library
from howdah.comm.engine_abi import load_library
from howdah.comm.settings import Settings, read_settings

NOBODY = 65534
CALLS = "#!/bin/sh\necho called >> {log}\nexec cc -O0 $(echo $@ | sed 's/-O3//')\n"
QUICK = '#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\nprintf compiled > "$2"\n'


def program(path, text):
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def compiler(tmp_path):
    """A compiler that counts how often it is called."""
    return program(tmp_path / "counting-cc", CALLS.format(log=tmp_path / "log"))


@pytest.fixture
def quick(tmp_path):
    """A compiler for tests that do not load what it makes."""
    return program(tmp_path / "quick-cc", QUICK)


def test_ranks_that_start_together_compile_once(tmp_path, compiler):
    settings = Settings((compiler,), tmp_path / "cache")
    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(lambda _: engine_library(settings), range(4)))
    assert len(found) == 1
    assert found.pop().stat().st_size > 10_000
    assert (tmp_path / "log").read_text() == "called\n"
    folder = tmp_path / "cache" / "engine"
    names = sorted(path.suffix for path in folder.iterdir())
    assert names == ["", ".so"]  # the lock, and nothing half made
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


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
    assert [path.name for path in (tmp_path / "cache" / "engine").iterdir()] == ["lock"]


def test_a_cache_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(NoCompiler, match="cannot be kept in"):
        engine_library(Settings(("cc",), tmp_path / "file"))


def test_what_was_left_by_those_who_were_killed_goes(tmp_path, quick):
    """With what the compiler had made until then, files and folders. Libraries stay."""
    settings = Settings((quick,), tmp_path / "cache")
    library = engine_library(settings)
    other = library.with_name("engine-other.so")
    library.rename(other)
    left = library.parent / "tmpabc"
    left.mkdir()
    (left / "cc1.s").touch()
    library.with_suffix(".123").touch()
    assert engine_library(settings) == library
    assert {path.name for path in library.parent.iterdir()} == {"lock", library.name, other.name}


@pytest.mark.parametrize("damage", [lambda b: b[:3], lambda b: b"", lambda b: b"d" + b[1:]])
def test_a_library_that_is_damaged_is_compiled_anew(tmp_path, quick, damage):
    """One that was cut off ended every run with SIGBUS, and told to try the same again."""
    settings = Settings((quick,), tmp_path / "cache")
    library = engine_library(settings)
    whole = library.read_bytes()
    library.write_bytes(damage(whole))
    with pytest.raises(NoCompiler, match="is damaged"):
        load_library(library)
    assert engine_library(settings) == library and library.read_bytes() == whole


# -- what others could have written


def test_what_lies_in_a_folder_that_was_open_to_others_is_compiled_anew(tmp_path, quick):
    settings = Settings((quick,), tmp_path / "cache")
    library = engine_library(settings)
    planted = library.with_name("planted.so")
    for path in (library, planted):
        path.write_bytes(b"not what was compiled")
    library.parent.chmod(0o777)
    assert engine_library(settings) == library
    assert library.read_bytes()[:-4] == b"compiled"
    assert stat.S_IMODE(library.parent.stat().st_mode) == 0o700
    assert not planted.exists()


def test_a_library_that_others_may_write_is_refused(tmp_path, quick):
    settings = Settings((quick,), tmp_path / "cache")
    library = engine_library(settings)
    library.chmod(0o722)
    with pytest.raises(NoCompiler, match=f"{library} is not loaded, for others could have written"):
        engine_library(settings)
    with pytest.raises(NoCompiler, match="is not loaded"):
        load_library(library)


def test_a_library_is_written_for_this_user_alone_whatever_the_mask(tmp_path, quick):
    before = os.umask(0)
    try:
        assert engine_library(Settings((quick,), tmp_path / "cache")).exists()
    finally:
        os.umask(before)


@pytest.mark.parametrize("way", ["link to a library", "link to a folder", "pipe"])
def test_what_is_no_file_of_the_folder_is_refused(tmp_path, quick, way):
    settings = Settings((quick,), tmp_path / "cache")
    library = engine_library(settings)
    if way == "link to a folder":
        library.parent.rename(tmp_path / "elsewhere")
        library.parent.symlink_to(tmp_path / "elsewhere")
    else:
        library.rename(tmp_path / "elsewhere.so")
        if way == "pipe":
            os.mkfifo(library, 0o700)
        else:
            library.symlink_to(tmp_path / "elsewhere.so")
    with pytest.raises(NoCompiler, match=r"is not loaded|cannot be kept"):
        engine_library(settings)


def test_what_is_loaded_is_the_file_that_was_looked_at():
    """And not a name, which may be another file by then; each library has a number of its own."""
    library = engine_library(read_settings())
    name = load_library(library)._name
    assert name.startswith("/proc/self/fd/")
    assert os.path.samefile(name, library)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")
@pytest.mark.parametrize("theirs", ["library", "folder", "lock"])
def test_what_is_another_users_is_refused(tmp_path, quick, theirs):
    settings = Settings((quick,), tmp_path / "cache")
    library = engine_library(settings)
    folder = library.parent
    if theirs == "lock":
        library.unlink()
    os.chown({"library": library, "folder": folder, "lock": folder / "lock"}[theirs], NOBODY, -1)
    sentence = {
        "library": f"{library} is not loaded, for others could have written it: remove it",
        "folder": f"nothing is loaded from {folder}, for it belongs to user {NOBODY}: .*HOWDAH",
        "lock": f"{folder} holds the lock of another user",
    }
    with pytest.raises(NoCompiler, match=sentence[theirs]):
        engine_library(settings)


@pytest.mark.parametrize(("mode", "taken"), [(0o755, True), (0o775, True), (0o757, False)])
def test_the_installed_library_is_not_open_to_all(tmp_path, monkeypatch, mode, taken):
    """The group may write what an installer made under a mask of 002, and the package beside it."""
    monkeypatch.setattr(build, "HERE", tmp_path)
    installed = tmp_path / "_engine.cpython-311.so"
    installed.touch()
    installed.chmod(mode)
    if taken:
        assert engine_library(Settings(("no-such-cc",), tmp_path)) == installed
    else:
        with pytest.raises(NoCompiler, match="others could have written"):
            engine_library(Settings(("no-such-cc",), tmp_path))


def test_settings_come_from_the_environment(monkeypatch):
    for name in ("CC", "HOWDAH_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert read_settings() == Settings(("cc",), Path.home() / ".cache" / "howdah")
    monkeypatch.setenv("XDG_CACHE_HOME", "/there")
    monkeypatch.setenv("CC", "clang -m64")
    assert read_settings() == Settings(("clang", "-m64"), Path("/there/howdah"))
    monkeypatch.setenv("HOWDAH_CACHE", "/here")
    assert read_settings().cache == Path("/here/howdah")


def test_a_compiler_that_is_no_command_is_refused(monkeypatch):
    """It was a traceback of shlex, of the first group that was connected."""
    monkeypatch.setenv("CC", "gcc '-O2")
    with pytest.raises(
        UserError, match=r'^CC is "gcc \'-O2", which is no command \(No closing quo'
    ):
        read_settings()


def test_a_user_without_a_home_folder_is_told_to_name_one(monkeypatch):
    """As in a container that runs as a number: `train` and `doctor` ended in a traceback."""
    for name in ("HOME", "HOWDAH_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    with pytest.raises(UserError, match=r"^there is no home folder .* a folder as HOWDAH_CACHE$"):
        read_settings()
    monkeypatch.setenv("XDG_CACHE_HOME", "/there")
    assert read_settings().cache == Path("/there/howdah")
