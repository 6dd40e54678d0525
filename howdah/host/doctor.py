"""Checks of this machine for a run: the findings of `howdah doctor`.

    facts.py reads the system  →  judge_* functions decide (pure)  →  findings  →  printed

A finding is a name and a value, and where something is missing, one sentence: what this means for a
run and what to do. No finding is a failure: every machine that can print the findings can train.
A value that the system does not provide (macOS has no /proc) is "not known".
"""

import os
import platform
import resource
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from howdah.host import facts as machine
from howdah.host import ring
from howdah.host.card_findings import judge_cards, read_cards
from howdah.host.facts import Interface
from howdah.host.finding import GIB, Finding, in_words
from howdah.host.peak import PRECISIONS, Facts, Measured, data_sheet, facts_of, kept

UNKNOWN = "not known on this system"


def doctor(cache: Path | None) -> list[Finding]:
    """The findings on everything that a run depends on. Writes no files and opens no connections.

    cache  the folder for tokens and measured peaks; None if it is not known
    """
    allowed, quota = machine.allowed_cores(), machine.core_quota()
    findings = [
        Finding("python", f"{platform.python_version()} on {platform.system()}"),
        judge_cores(os.cpu_count() or allowed, allowed, quota),
        judge_memory(machine.memory(), machine.memory_limit()),
        judge_compiler({name: shutil.which(name) for name in ("cc", "gcc", "clang")}),
        judge_torch(torch.__version__, torch.get_num_threads(), min(allowed, quota or allowed)),
        judge_bf16(machine.bf16_instructions(), torch.backends.cpu.get_cpu_capability()),
        *judge_cards(read_cards()),
        judge_network(machine.interfaces(), machine.gloo_address()),
        judge_ring(ring.refused()),
        judge_open_files(*resource.getrlimit(resource.RLIMIT_NOFILE)),
    ]
    if cache is None:
        return findings
    here = facts_of(main_device(), torch.float32, threads=0)
    return [*findings, judge_peaks(here, kept(cache, here)), _judge_cache(cache)]


def main_device() -> torch.device:
    """The device on which runs train by default."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def _judge_cache(cache: Path) -> Finding:
    folder = machine.nearest_there(cache)
    disk = machine.disk(folder)
    if disk is None or not folder.is_dir():
        return Finding("disk", f"{folder}", f"{folder} is not a folder: give another one")
    return judge_disk(folder, disk[1], writable=os.access(folder, os.W_OK | os.X_OK))


# -- judging: pure, one function per finding -----------------------------------


def judge_cores(present: int, allowed: int, quota: float | None) -> Finding:
    """The finding on CPU cores.

    present  cores of the machine
    allowed  cores by the scheduler's affinity
    quota    cores' worth of time by the control group; None: no limit
    """
    value = f"{allowed} of {present} usable"
    if quota is not None and quota < allowed:
        ranks = max(1, int(quota))
        return Finding(
            "cores",
            f"{value}, quota {quota:g}",
            f"the control group grants {quota:g} of these {allowed} cores and halts what takes "
            f"more: start at most {ranks} rank{'s' if ranks > 1 else ''} of one thread here",
        )
    if allowed == 1:
        lack = "with one core the ranks take turns: no layout is faster here than `single`"
        return Finding("cores", value, lack)
    return Finding("cores", value)


def judge_memory(sizes: Mapping[str, int], limit: int | None) -> Finding:
    """The finding on memory.

    sizes  bytes by the names of /proc/meminfo
    limit  bytes by the control group; None: no limit
    """
    if "MemTotal" not in sizes:
        return Finding("memory", UNKNOWN)
    free = sizes.get("MemAvailable", sizes["MemTotal"])
    value = f"{in_words(sizes['MemTotal'])}, {in_words(free)} available"
    if limit is not None and limit < sizes["MemTotal"]:
        value, free = f"{value}, limit {in_words(limit)}", min(free, limit)
    if free >= GIB:
        return Finding("memory", value)
    lack = f"only {in_words(free)} to use, and a rank takes about 220 MiB before its first weight"
    return Finding("memory", value, f"{lack}: start few ranks, or free some memory")


def judge_compiler(found: Mapping[str, str | None]) -> Finding:
    """The finding on C compilers. `found` maps names to paths or None, in order of preference."""
    for path in found.values():
        if path is not None:
            return Finding("compiler", path)
    names = ", ".join(found)
    lack = f"none of {names} was found: unless a wheel brought the engine, gloo is used"
    return Finding("compiler", "none", f"{lack}; install gcc or clang")


def judge_torch(version: str, threads: int, cores: float) -> Finding:
    """The finding on torch. `threads` is its thread count, `cores` the usable cores, with quota."""
    value = f"{version}, {threads} thread{'s' if threads > 1 else ''}"
    if parse_version(version) < (2, 11):
        return Finding("torch", value, "howdah needs torch 2.11 or newer: upgrade it")
    if threads > cores:
        lack = f"{threads} threads share {cores:g} cores and wait for each other"
        return Finding("torch", value, f"{lack}: set OMP_NUM_THREADS={max(1, int(cores))}")
    return Finding("torch", value)


def judge_bf16(names: Sequence[str] | None, vectors: str) -> Finding:
    """The finding on the CPU's instructions for bf16.

    names    of its instruction sets for bf16; None where they are not known
    vectors  the vector instruction set that torch uses, such as AVX2
    """
    if names is None:
        return Finding("cpu", f"{vectors}, bf16 {UNKNOWN}")
    if names:
        return Finding("cpu", f"{vectors}, {' and '.join(names)}")
    lack = "without bf16 instructions bf16 is many times as slow; use method.precision=float32"
    return Finding("cpu", f"{vectors}, no bf16", lack)


def judge_network(interfaces: Iterable[Interface] | None, gloo: str) -> Finding:
    """The finding on network interfaces.

    gloo  the address that torch's gloo binds to if GLOO_SOCKET_IFNAME is not set
    """
    if interfaces is None:
        return Finding("network", UNKNOWN)
    named = [interface for interface in interfaces if interface.addresses]
    chosen = next((interface for interface in named if gloo in interface.addresses), None)
    value = ", ".join(f"{interface.name} {' '.join(interface.addresses)}" for interface in named)
    value = f"{value}; gloo takes {chosen.name if chosen else gloo}"
    outward = [interface.name for interface in named if not interface.loopback]
    if not outward:
        lack = "there is only loopback: all ranks of a run must be on this machine"
        return Finding("network", value, lack)
    if chosen is None or chosen.loopback:
        return Finding(
            "network",
            value,
            "the host name leads to loopback, so gloo reaches no other machine: for runs on "
            f"several, set GLOO_SOCKET_IFNAME={outward[0]}",
        )
    return Finding("network", value)


def judge_ring(why: OSError | None) -> Finding:
    """The finding on io_uring; `why` the kernel refuses it, None if it does not."""
    if why is None:
        return Finding("io_uring", "there")
    lack = "homes on the disk are read and written by threads; many containers refuse io_uring"
    return Finding("io_uring", f"none: {why.strerror}", lack)


def judge_open_files(soft: int, hard: int) -> Finding:
    """The finding on open files, from the soft and hard limits of the process; -1: no limit."""
    words = ["no limit" if limit < 0 else str(limit) for limit in (soft, hard)]
    value = f"{words[0]}, can be raised to {words[1]}" if soft != hard else words[0]
    if soft < 0 or soft >= 1024:
        return Finding("open files", value)
    lack = "a rank keeps two sockets to every other rank of each group: for many ranks raise it"
    return Finding("open files", value, f"{lack} with ulimit -n 4096")


def judge_peaks(here: Facts, found: Sequence[Measured]) -> Finding:
    """The finding on the flop/s that `mfu` divides by: `found` was measured on `here`, and kept."""
    rows = [f"{one.flops / 1e9:,.0f} {_spell(one.facts)}" for one in found]
    kinds = [str(dtype).removeprefix("torch.") for dtype in PRECISIONS]
    sheets = {kind: data_sheet(replace(here, precision=kind)) for kind in kinds}
    known = [f"{one.flops / 1e9:,.0f} {kind}" for kind, one in sheets.items() if one]
    rows += [f"{', '.join(known)} (data sheet)"] if known else []
    if not rows:
        return Finding("peak", "not measured yet; a run does it, or howdah doctor --measure")
    value = f"Gflop/s: {', '.join(rows)}"
    if not any(one.disturbed for one in found):
        return Finding("peak", value)
    lack = "other programs took the cores while this was measured, so it is too low"
    return Finding("peak", value, f"{lack}: run howdah doctor --measure on a quiet machine")


def _spell(facts: Facts) -> str:
    plural = "s" if facts.threads > 1 else ""
    return facts.precision + (f" with {facts.threads} thread{plural}" if facts.threads else "")


def judge_disk(folder: Path, free: int, *, writable: bool) -> Finding:
    """The finding on disk space.

    folder    the cache, or its nearest parent folder that exists
    free      bytes
    writable  this process can create files in it
    """
    value = f"{in_words(free)} free at {folder}"
    if not writable:
        return Finding("disk", value, f"{folder} cannot be written: give another folder")
    if free < GIB:
        lack = f"only {in_words(free)}: with Adam a checkpoint takes 12 bytes a parameter"
        return Finding("disk", value, f"{lack}; free some, or give another folder")
    return Finding("disk", value)


def parse_version(text: str) -> tuple[int, ...]:
    """The major and minor number of a version of torch: (2, 13) for 2.13.0+cpu."""
    return tuple(int(word) for word in text.split(".")[:2])
