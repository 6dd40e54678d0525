"""Reads facts of the machine: cores, memory, control groups, disks, network interfaces.

The kernel provides most of them as text under /proc and /sys. Functions named `parse_` are pure and
take that text; the others read it. For a fact that the system does not provide they return None or
an empty value.

The cores and memory available to a process are those of its control group, not those of the
machine. There is a limit at every level up to the root, and the smallest one applies:

    /sys/fs/cgroup/a/b/cpu.max, a/cpu.max                            version 2: one tree
    /sys/fs/cgroup/cpu/a/b/cpu.cfs_quota_us, cpu/a/..., cpu/...      version 1: one per controller

Inside a container the path may lead outside of the mounted tree. Then only the root exists, and
it is the container's own control group.
"""

import os
import platform
import shutil
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from fcntl import ioctl
from pathlib import Path
from time import sleep
from typing import TypeVar

PROC, GROUPS, NETWORK = Path("/proc"), Path("/sys/fs/cgroup"), Path("/sys/class/net")
CARDS = (Path("/proc/driver/nvidia"), Path("/dev/nvidia0"), Path("/dev/kfd"))  # the last is AMD's
GET_ADDRESS = 0x8915  # SIOCGIFADDR of linux/sockios.h
UP, LOOPBACK = 0x1, 0x8  # IFF_UP and IFF_LOOPBACK of linux/if.h

Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class Interface:
    """A network interface that is up, with its addresses."""

    name: str
    addresses: tuple[str, ...]
    loopback: bool


# -- parsing: pure -------------------------------------------------------------


def parse_sizes(meminfo: str) -> dict[str, int]:
    """Bytes by name, from the text of /proc/meminfo (where 1 kB is 1024 bytes)."""
    lines = (line.split() for line in meminfo.splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) == 3}


def parse_quota(text: str) -> float | None:
    """Cores' worth of time from the text "quota period", both in microseconds; None: no quota (max
    or -1).
    """
    words = text.split()
    if len(words) != 2 or words[0] in ("max", "-1"):
        return None
    return int(words[0]) / int(words[1])


def parse_limit(text: str) -> int | None:
    """Bytes of a memory limit; None for `max`, and for the huge number that means the same in
    version 1.
    """
    text = text.strip()
    return int(text) if text.isdecimal() and int(text) < 2**60 else None


def parse_cpu_model(cpuinfo: str) -> str | None:
    """The CPU's name, from the text of /proc/cpuinfo; None where it has none, as on ARM."""
    pairs = (line.partition(":") for line in cpuinfo.splitlines())
    return next((name.strip() for key, _, name in pairs if key.strip() == "model name"), None)


def parse_bf16(cpuinfo: str) -> list[str] | None:
    """The CPU's instruction sets for bf16 in order, from the text of /proc/cpuinfo (flags on x86,
    Features on ARM); None where it lists no instruction sets.
    """
    pairs = (line.partition(":") for line in cpuinfo.splitlines())
    lists = (names for key, _, names in pairs if key.strip() in {"flags", "Features"})
    names = next(lists, None)
    return None if names is None else sorted({n for n in names.split() if "bf16" in n})


def parse_busy(before: str, after: str) -> float:
    """The share of the processors' time that was not idle, from two texts of /proc/stat. What a
    hypervisor gave to others (steal) is not idle; waiting for a disk is.
    """
    first, last = (
        [int(word) for word in text.split("\n", 1)[0].split()[1:9]] for text in (before, after)
    )
    passed = [b - a for a, b in zip(first, last, strict=True)]
    return 1 - sum(passed[3:5]) / sum(passed) if sum(passed) else 0.0


def parse_control_groups(text: str, controller: str) -> list[str]:
    """Folders below /sys/fs/cgroup that limit this process, from the text of /proc/self/cgroup.

    >>> parse_control_groups("4:memory:/a/b", "memory")
    ['memory/a/b', 'memory/a', 'memory']
    """
    folders = []
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        tree = [controller] if controllers else []
        parts = [part for part in path.split("/") if part]
        folders += ["/".join([*tree, *parts[:end]]) for end in range(len(parts), -1, -1)]
    return folders


def parse_ipv6(text: str) -> dict[str, list[str]]:
    """IPv6 addresses by interface, without link-local ones, from the text of /proc/net/if_inet6."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        digits, *_, name = line.split()
        address = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
        if not address.startswith("fe80:"):
            found.setdefault(name, []).append(address)
    return found


# -- reading -------------------------------------------------------------------


def cpu_model() -> str:
    """The CPU's name; where the system has none, its architecture."""
    return parse_cpu_model(_text(PROC / "cpuinfo")) or platform.machine()


def bf16_instructions() -> list[str] | None:
    """The names of the CPU's instruction sets for bf16; None where that is not known."""
    return parse_bf16(_text(PROC / "cpuinfo"))


def allowed_cores() -> int:
    """Number of cores this process may run on; all cores if the system has no affinity (macOS)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def core_quota() -> float | None:
    """Cores' worth of time that the control group grants; None: no limit."""
    texts = []
    for folder in _control_groups("cpu"):
        texts.append(_text(folder / "cpu.max"))
        first = _text(folder / "cpu.cfs_quota_us")
        texts.append(f"{first} {_text(folder / 'cpu.cfs_period_us')}")
    return _tightest(map(parse_quota, texts))


def usable_cores() -> int:
    """Cores that this process gets: those it may run on, or fewer where the control group grants
    less of their time. A quota of 2.5 counts as 2, one below 1 as 1.
    """
    quota = core_quota()
    allowed = allowed_cores()
    return allowed if quota is None else max(1, min(allowed, int(quota)))


def has_card() -> bool:
    """Whether the system has an accelerator, whether torch can use it or not. Loads no driver."""
    return any(path.exists() for path in CARDS) or shutil.which("nvidia-smi") is not None


def memory() -> dict[str, int]:
    """Bytes by the names of /proc/meminfo; empty if the system has no such file."""
    return parse_sizes(_text(PROC / "meminfo"))


def memory_limit() -> int | None:
    """Bytes of memory that the control group grants; None: no limit."""
    names = ("memory.max", "memory.limit_in_bytes")
    texts = [_text(folder / name) for folder in _control_groups("memory") for name in names]
    return _tightest(map(parse_limit, texts))


def total_memory() -> int | None:
    """Bytes of memory that this process and others may take: the machine's, or what the control
    groups grant where that is less. None if the system provides neither.
    """
    return _tightest([memory().get("MemTotal"), memory_limit()])


def free_memory() -> int | None:
    """Bytes of memory that processes can still allocate: the smaller of what the machine has
    available and what the control groups still grant. None if the system provides neither.
    """
    return _tightest([memory().get("MemAvailable"), *map(_left, _control_groups("memory"))])


def _left(group: Path) -> int | None:
    """Bytes that a control group still grants; None: no limit. Its inactive file cache counts as
    free, because the kernel can drop it.
    """
    limits = map(parse_limit, (_text(group / "memory.max"), _text(group / "memory.limit_in_bytes")))
    used = _text(group / "memory.current") or _text(group / "memory.usage_in_bytes") or "0"
    words = _text(group / "memory.stat").split()
    stat = dict(zip(words[::2], words[1::2], strict=False))
    files = stat.get("total_inactive_file") or stat.get("inactive_file") or "0"
    limit = _tightest(limits)
    return None if limit is None else max(limit - max(int(used) - int(files), 0), 0)


def disk(folder: Path) -> tuple[int, int] | None:
    """Total and free bytes of the disk that holds `folder`; None if the folder does not exist."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return None
    return usage.total, usage.free


def nearest_there(path: Path) -> Path:
    """`path` itself, or the nearest folder above it that exists."""
    path = path.absolute()
    return next(place for place in (path, *path.parents) if os.path.exists(place))


def interfaces() -> list[Interface] | None:
    """The interfaces that are up; None if the system has no list of them as Linux has."""
    if not NETWORK.is_dir():
        return None
    ipv6 = parse_ipv6(_text(PROC / "net/if_inet6"))
    found = []
    for _, name in socket.if_nameindex():
        flags = int(_text(NETWORK / name / "flags") or "0", 16)
        if flags & UP:
            addresses = (*_ipv4(name), *ipv6.get(name, ()))
            found.append(Interface(name, addresses, bool(flags & LOOPBACK)))
    return found


def gloo_address() -> str:
    """The address torch's gloo binds to when GLOO_SOCKET_IFNAME does not name an interface.

    It is the first address of the host name that can be bound, or loopback if there is none
    (torch/csrc/distributed/c10d/ProcessGroupGloo.cpp, createDefaultDevice).
    """
    try:
        answers = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return "127.0.0.1"
    for family, kind, protocol, _, address in answers:
        try:
            with socket.socket(family, kind, protocol) as end:
                end.bind(address)
        except OSError:
            continue
        return str(address[0])
    return "127.0.0.1"


def busy_share(seconds: float) -> float:
    """The share of the processors' time that others take while this process sleeps; 0 if the system
    does not say.
    """
    before = _text(PROC / "stat")
    sleep(seconds)
    return parse_busy(before, _text(PROC / "stat"))


def _ipv4(name: str) -> tuple[str, ...]:
    """The IPv4 address of an interface, as a tuple of one or no text. The kernel returns a struct
    ifreq: 16 bytes of name, then a sockaddr_in.
    """
    request = struct.pack("256s", name.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
        try:
            answer = ioctl(end, GET_ADDRESS, request)
        except OSError:
            return ()  # the interface has no address
    return (socket.inet_ntoa(answer[20:24]),)


def _control_groups(controller: str) -> list[Path]:
    folders = parse_control_groups(_text(PROC / "self/cgroup"), controller)
    return [GROUPS / folder for folder in folders]


def _text(path: Path) -> str:
    """The text of a file; empty if it cannot be read, because systems differ in their files."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def _tightest(limits: Iterable[Number | None]) -> Number | None:
    return min((limit for limit in limits if limit is not None), default=None)
