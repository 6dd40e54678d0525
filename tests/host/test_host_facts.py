"""Reading the machine: made-up texts of the kernel, and a made-up tree of control groups."""

import os

import pytest
import torch

from howdah.host import facts as machine
from howdah.host.facts import (
    parse_control_groups,
    parse_ipv6,
    parse_limit,
    parse_quota,
    parse_sizes,
)
from howdah.host.measured import capacity, peak_memory


def test_sizes_are_in_bytes():
    text = "MemTotal:       24684096 kB\nMemAvailable:       1024 kB\nHugePages_Total:       0\n"
    assert parse_sizes(text) == {"MemTotal": 24684096 * 1024, "MemAvailable": 2**20}
    assert parse_sizes("") == {}


@pytest.mark.parametrize(
    ("text", "quota"),
    [
        ("150000 100000\n", 1.5),
        ("max 100000\n", None),
        ("-1\n 100000\n", None),
        ("400000\n 100000\n", 4.0),
        (" ", None),
    ],
)
def test_a_quota_is_in_cores(text, quota):
    assert parse_quota(text) == quota


@pytest.mark.parametrize(
    ("text", "limit"),
    [("1073741824\n", 2**30), ("max\n", None), ("9223372036854771712\n", None), ("", None)],
)
def test_a_limit_is_in_bytes(text, limit):
    assert parse_limit(text) == limit


def test_control_groups_of_version_2_are_one_tree():
    folders = ["user.slice/session-1", "user.slice", ""]
    assert parse_control_groups("0::/user.slice/session-1\n", "cpu") == folders
    assert parse_control_groups("0::/\n", "memory") == [""]


def test_control_groups_of_version_1_have_a_tree_per_controller():
    text = "9:name=systemd:/x\n4:memory:/docker/ab:c\n1:cpu,cpuacct:/docker/abc\n"
    assert parse_control_groups(text, "cpu") == ["cpu/docker/abc", "cpu/docker", "cpu"]
    assert parse_control_groups(text, "memory") == ["memory/docker/ab:c", "memory/docker", "memory"]
    assert parse_control_groups(text, "pids") == []


def test_ipv6_addresses_leave_out_link_local_ones():
    text = (
        "fd000000000000000000000000000002 04 40 00 82     eth0\n"
        "fe8000000000000000fc00fffe000001 04 40 20 80     eth0\n"
        "00000000000000000000000000000001 01 80 10 80       lo\n"
    )
    assert parse_ipv6(text) == {"eth0": ["fd00::2"], "lo": ["::1"]}


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """A tree of control groups in which the process sits in /a/b. Returns a function to fill it."""
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text("7:cpu:/a/b\n0::/a/b\n")
    monkeypatch.setattr(machine, "PROC", tmp_path)
    monkeypatch.setattr(machine, "GROUPS", tmp_path)

    def write(place, text):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text(text)

    return write


def test_the_tightest_limit_on_the_way_to_the_root_wins(groups):
    assert machine.core_quota() is None
    assert machine.memory_limit() is None
    groups("a/b/cpu.max", "max 100000")
    groups("a/cpu.max", "300000 100000")
    groups("a/b/memory.max", str(2**31))
    groups("a/memory.max", str(2**30))
    assert machine.core_quota() == 3.0
    assert machine.memory_limit() == 2**30


def test_the_memory_of_a_container_is_what_it_is_granted(groups):
    """The share in a run's log line, and the memory of `here`, were of the machine around it."""
    assert machine.total_memory() is None
    groups("meminfo", f"MemTotal: {2**22} kB\n")
    assert machine.total_memory() == 2**32
    groups("a/memory.max", str(2**30))
    assert machine.total_memory() == 2**30
    used = peak_memory(torch.device("cpu"))
    assert used.total == capacity(torch.device("cpu"), 2).total == 2**30


def test_limits_of_version_1_are_read(groups):
    groups("cpu/a/cpu.cfs_quota_us", "50000")
    groups("cpu/a/cpu.cfs_period_us", "100000")
    assert machine.core_quota() == 0.5


@pytest.mark.parametrize(
    ("allowed", "quota", "usable"),
    [(8, None, 8), (64, "200000", 2), (64, "250000", 2), (2, "800000", 2), (4, "50000", 1)],
)
def test_a_container_s_quota_bounds_the_cores(groups, monkeypatch, allowed, quota, usable):
    """With two cores' worth of time on 64 cores, 32 threads a rank would wait for each other."""
    monkeypatch.setattr(machine, "allowed_cores", lambda: allowed)
    if quota:
        groups("a/b/cpu.max", f"{quota} 100000")
    assert machine.usable_cores() == usable


def test_what_a_control_group_still_grants_is_what_is_free(groups):
    groups("meminfo", f"MemAvailable: {2**21} kB\n")
    assert machine.free_memory() == 2**31
    groups("a/memory.max", str(2**30))
    assert machine.free_memory() == 2**30
    groups("a/memory.current", str(2**29))
    groups("a/memory.stat", f"anon 7\ninactive_file {2**28}\n")
    assert machine.free_memory() == 2**30 - 2**28
    groups("a/memory.current", str(2**31))
    assert machine.free_memory() == 0


def test_the_nearest_folder_that_exists(tmp_path):
    assert machine.nearest_there(tmp_path / "a/b/c") == tmp_path
    assert machine.nearest_there(tmp_path) == tmp_path
    assert machine.disk(tmp_path / "a") is None


def test_this_machine_can_be_read():
    assert 1 <= machine.usable_cores() <= machine.allowed_cores() <= (os.cpu_count() or 1)
    size, free = machine.disk(machine.nearest_there(machine.PROC))
    assert 0 <= free <= size
    found = machine.interfaces()
    if found is not None:  # Linux
        loopback = [address for each in found if each.loopback for address in each.addresses]
        assert "127.0.0.1" in loopback
        assert machine.memory()["MemTotal"] > 2**20
    assert machine.gloo_address()
