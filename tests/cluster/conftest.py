"""A cluster in a box, for tests: its modules, and why there is none here."""

import os
import sys
from pathlib import Path

import pytest

CLUSTER = Path(__file__).parents[2] / "bench" / "cluster"


@pytest.fixture
def modules(monkeypatch):
    """Imports modules of bench/cluster by name; other folders of bench/ have equal names."""
    before = set(sys.modules)

    def load(*names):
        for folder in (CLUSTER.parent, CLUSTER):
            monkeypatch.syspath_prepend(str(folder))
        return [__import__(name) for name in names]

    yield load
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").is_relative_to(CLUSTER.parent):
            del sys.modules[name]


@pytest.fixture
def box(modules):
    """Makes a box: box("flat-1g", 2) is to be entered. Skips where there can be none."""
    made, profiles = modules("box", "profiles")
    if why_not := made.problem():
        pytest.skip(why_not)

    def make(name, hosts):
        return made.Box(profiles.profile_named(name, hosts), hosts)

    return make


@pytest.fixture
def left():
    """What a box could leave in the system, as a function."""

    def look():
        names = {*os.listdir("/sys/class/net")}
        for folder in ("/dev/shm", "/run/netns"):
            names |= {*os.listdir(folder)} if os.path.isdir(folder) else set()
        # Namespaces live as long as a process in them.
        spaces = set()
        for process in Path("/proc").glob("[0-9]*"):
            try:
                spaces.add(os.readlink(process / "ns" / "net"))
            except OSError:
                continue
        return names, spaces

    return look
