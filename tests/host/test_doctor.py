"""What the doctor says of made-up machines, and one look at the real one."""

from pathlib import Path

import pytest
import torch

from howdah.host.doctor import (
    doctor,
    judge_bf16,
    judge_compiler,
    judge_cores,
    judge_disk,
    judge_memory,
    judge_network,
    judge_open_files,
    judge_ring,
    judge_torch,
    parse_version,
)
from howdah.host.facts import Interface
from howdah.host.finding import GIB, MIB, in_words

LO = Interface("lo", ("127.0.0.1", "::1"), loopback=True)
ETH = Interface("eth0", ("192.0.2.2",), loopback=False)
IDLE = Interface("eth1", (), loopback=False)
FOLDER = Path("cache")

# (finding, value, a part of the lack or None)
CASES = [
    (judge_cores(8, 8, None), "8 of 8 usable", None),
    (judge_cores(8, 4, None), "4 of 8 usable", None),
    (judge_cores(8, 4, 4.0), "4 of 8 usable", None),
    (judge_cores(8, 8, 2.5), "8 of 8 usable, quota 2.5", "at most 2 ranks of one thread"),
    (judge_cores(8, 8, 0.5), "8 of 8 usable, quota 0.5", "at most 1 rank of one thread"),
    (judge_cores(8, 1, None), "1 of 8 usable", "no layout is faster here than `single`"),
    (judge_memory({}, None), "not known on this system", None),
    (judge_memory({"MemTotal": 8 * GIB, "MemAvailable": 6 * GIB}, None), "8.0 GiB, 6.0 GiB", None),
    (judge_memory({"MemTotal": 8 * GIB}, 64 * GIB), "8.0 GiB, 8.0 GiB available", None),
    (judge_memory({"MemTotal": 8 * GIB}, 512 * MIB), "limit 512.0 MiB", "only 512.0 MiB to use"),
    (judge_memory({"MemTotal": GIB, "MemAvailable": 9 * MIB}, None), "9.0 MiB", "only 9.0 MiB"),
    (judge_compiler({"cc": None, "gcc": "/opt/gcc"}), "/opt/gcc", None),
    (judge_compiler({"cc": None, "gcc": None}), "none", "none of cc, gcc was found"),
    (judge_torch("2.13.0+cpu", 2, 2), "2.13.0+cpu, 2 threads", None),
    (judge_torch("2.11.0a0", 1, 1.5), "2.11.0a0, 1 thread", None),
    (judge_torch("2.9.1", 1, 1), "2.9.1", "needs torch 2.11 or newer"),
    (judge_torch("2.13.0", 8, 2.5), "8 threads", "set OMP_NUM_THREADS=2"),
    (judge_bf16(["avx512_bf16"], "AVX512"), "AVX512, avx512_bf16", None),
    (judge_bf16([], "AVX2"), "AVX2, no bf16", "as slow"),
    (judge_bf16(None, "AVX2"), "AVX2, bf16 not known", None),
    (judge_network(None, "127.0.0.1"), "not known on this system", None),
    (judge_network([LO, ETH, IDLE], "192.0.2.2"), "eth0 192.0.2.2; gloo takes eth0", None),
    (judge_network([LO, ETH], "127.0.0.1"), "gloo takes lo", "set GLOO_SOCKET_IFNAME=eth0"),
    (judge_network([LO, ETH], "127.0.1.1"), "takes 127.0.1.1", "set GLOO_SOCKET_IFNAME=eth0"),
    (judge_network([LO, IDLE], "127.0.0.1"), "lo 127.0.0.1 ::1", "there is only loopback"),
    (judge_ring(None), "there", None),
    (judge_ring(PermissionError(1, "Operation not permitted")), "none: Operation", "by threads"),
    (judge_open_files(20000, 20000), "20000", None),
    (judge_open_files(-1, -1), "no limit", None),
    (judge_open_files(256, -1), "256, can be raised to no limit", "ulimit -n 4096"),
    (judge_disk(FOLDER, 5 * GIB, writable=True), "5.0 GiB free at cache", None),
    (judge_disk(FOLDER, 5 * GIB, writable=False), "5.0 GiB free", "cache cannot be written"),
    (judge_disk(FOLDER, 100 * MIB, writable=True), "100.0 MiB free", "12 bytes a parameter"),
]


@pytest.mark.parametrize(("finding", "value", "lack"), CASES)
def test_a_lack_is_said_in_one_sentence_with_a_way_out(finding, value, lack):
    assert value in finding.value
    if lack is None:
        assert finding.lack is None
    else:
        assert lack in finding.lack
        assert "\n" not in finding.lack and not finding.lack.endswith(".")


def test_sizes_in_words():
    assert [in_words(size) for size in (0, 64 * MIB, GIB - 1, 23.5 * GIB)] == [
        *("0.0 MiB", "64.0 MiB", "1024.0 MiB", "23.5 GiB"),
    ]


def test_versions_compare_as_numbers():
    assert parse_version("2.9.1") < parse_version("2.11.0+cpu") < parse_version("3.0.0a0+git1")


NAMES = ["python", "cores", "memory", "compiler", "torch", "cpu", "devices"]
OF_CARDS = ["driver", "links", "ranks"]
LATER = ["network", "io_uring", "open files", "peak", "disk"]


def test_this_machine_is_described(tmp_path):
    findings = doctor(tmp_path / "not" / "there")
    named = [finding.name for finding in findings]
    assert [name for name in named if name not in OF_CARDS] == [*NAMES, *LATER]
    assert torch.cuda.is_available() or not set(OF_CARDS) & set(named)
    assert all(finding.value for finding in findings)
    assert str(tmp_path) in findings[-1].value
    assert not any(tmp_path.iterdir()), "looking must leave nothing behind"


def test_without_a_cache_the_disk_is_not_judged():
    assert "disk" not in [finding.name for finding in doctor(None)]


def test_a_file_in_the_way_of_the_cache_is_said(tmp_path):
    (tmp_path / "cache").write_text("a file")
    assert doctor(tmp_path / "cache" / "tokens")[-1].lack == (
        f"{tmp_path / 'cache'} is not a folder: give another one"
    )
