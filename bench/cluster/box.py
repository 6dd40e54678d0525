"""A cluster in a box: hosts that share nothing but their files, and the network between them.

    this process ── pipe ── host 0 ── eth0 ══ wire ══ leaf0 ══ wire ══ eth0 ── host 1 ── pipe ──
                                              (switches stand in one more network namespace)

A host has namespaces of its own for its network, process numbers, name, mounts, shared memory of
System V and clocks since boot. /tmp and /dev/shm are its own; all other folders are those of the
machine, and so like a file system that all hosts see. Names (`host1`) and addresses (10.77.0.2) of
all hosts are known on each.

The switches are bridges; each wire is a veth pair with a token bucket at both ends. Who is where is
written into the bridges, and nobody asks: what a card has counted was sent by a program.

Nothing has a name outside: the namespaces live as long as the first process of each, which ends
when its pipe is closed. The kernel closes it when this process ends, however it ends, kills what
runs on the hosts, and removes their network and their temporary files.

Needs root, and `unshare`, `nsenter`, `ip`, `tc` and `bridge`.
"""

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from shutil import which
from typing import Any

from profiles import Profile, Wire, card_rate, leaf_of, spine_to, switches, wires

from howdah.base.errors import UserError

TOOLS = ("unshare", "nsenter", "ip", "tc", "bridge")
CARD = "eth0"
OWN = ("/tmp", "/dev/shm")  # folders that each host has for itself
SECRET = "/tmp/secret"  # of all hosts, with which their ranks join
LEAST_BURST = 32 << 10  # bytes
QUEUE = "50ms"  # what a wire holds back before it drops
UPTIME = 3600  # seconds by which the clocks since boot of neighbours differ
# Its own clean-up, too: a shell that is gone reaps nobody, the kernel does where CHLD is ignored.
FIRST = """
set -e
! test -e {ipv6} || echo 1 >{ipv6}
{steps}
echo ready
trap '' CHLD
exec cat >/dev/null
"""
IPV6 = "/proc/sys/net/ipv6/conf/all/disable_ipv6"  # it sends packets of its own
HOST = """
mount -t tmpfs tmpfs /dev/shm
{hide}
echo '{known}' >/dev/shm/.hosts
mount --bind /dev/shm/.hosts /etc/hosts
hostname {name}
echo reno >/proc/sys/net/ipv4/tcp_congestion_control
"""


def address(host: int) -> str:
    """The address of a host."""
    return f"10.77.0.{host + 1}"


def hardware(host: int) -> str:
    """The address of its card."""
    return f"02:77:00:00:00:{host + 1:02x}"


def problem() -> str:
    """Why no box can be made here; empty if one can."""
    if os.geteuid() != 0:
        return "a cluster in a box needs root: it makes network namespaces"
    if lacking := [tool for tool in TOOLS if not which(tool)]:
        return f"a cluster in a box needs {', '.join(lacking)}, of util-linux and iproute2"
    return ""


def own_tmp() -> str:
    """Steps that give a host a /tmp of its own, in which this checkout and Python are seen."""
    seen = {Path(__file__).resolve().parents[2], Path(sys.prefix), Path(sys.prefix).resolve()}
    below = [shlex.quote(str(path)) for path in sorted(seen) if path.is_relative_to("/tmp")]
    keep = [
        f"mkdir /dev/shm/{n} && mount --bind {path} /dev/shm/{n}" for n, path in enumerate(below)
    ]
    back = [
        f"mkdir -p {path} && mount --bind /dev/shm/{n} {path} && umount /dev/shm/{n}"
        for n, path in enumerate(below)
    ]
    return "\n".join([*keep, "mount -t tmpfs tmpfs /tmp", *back])


@dataclass(frozen=True)
class Cage:
    """Namespaces, and what keeps them: their first process, and the `unshare` that started it."""

    keeper: subprocess.Popen[bytes]
    first: int

    def enter(self) -> list[str]:
        """The words in front of a command that is to run inside."""
        kinds = ("net", "pid", "uts", "mount", "ipc", "time")
        return ["nsenter", "--target", str(self.first), *(f"--{kind}" for kind in kinds), "--"]

    def batch(self, tool: str, lines: Sequence[str]) -> None:
        """Runs lines of `ip`, `tc` or `bridge` on its network."""
        words = ["nsenter", "--target", str(self.first), "--net", tool, "-batch", "-"]
        done = subprocess.run(
            words, input="\n".join(lines), text=True, capture_output=True, check=False
        )
        if done.returncode:
            raise UserError(f"the network of the box cannot be built: {done.stderr.strip()}")

    def close(self) -> None:
        """Ends all processes inside."""
        with suppress(ProcessLookupError):
            os.kill(self.first, signal.SIGKILL)
        for pipe in (self.keeper.stdin, self.keeper.stdout):
            if pipe:
                pipe.close()
        self.keeper.wait()


def cage(steps: str, *, uptime: int = 0) -> Cage:
    """New namespaces, whose first process has taken the shell's `steps`. Raises UserError."""
    kinds = ("net", "pid", "uts", "mount", "ipc", "time")
    clocks = [f"--monotonic={uptime}", f"--boottime={uptime}"]
    words = ["unshare", *(f"--{kind}" for kind in kinds), *clocks, "--fork", "--mount-proc"]
    keeper = subprocess.Popen(
        [*words, "sh", "-c", FIRST.format(steps=steps, ipv6=IPV6)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for what runs on the hosts
    )
    assert keeper.stdout and keeper.stderr
    if keeper.stdout.readline() != b"ready\n":
        raise UserError(f"a host cannot be made: {keeper.stderr.read().decode().strip()}")
    keeper.stderr.close()
    children = Path(f"/proc/{keeper.pid}/task/{keeper.pid}/children").read_text("utf-8")
    return Cage(keeper, int(children.split()[0]))


class Box:
    """Hosts and their network, from `with` to its end.

    Raises UserError without root, or where the kernel cannot do it.
    """

    def __init__(self, profile: Profile, hosts: int) -> None:
        if why_not := problem():
            raise UserError(why_not)
        self.profile, self.hosts = profile, hosts
        self._cages: list[Cage] = []
        self._started: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> "Box":
        known = "\n".join(f"{address(h)} host{h}" for h in range(self.hosts))
        try:
            for h in range(self.hosts):
                table = f"127.0.0.1 localhost\n{known}"
                steps = HOST.format(hide=own_tmp(), known=table, name=f"host{h}")
                self._cages.append(cage(steps, uptime=h * UPTIME))
            self._cages.append(cage(":"))
            self._connect()
            secret = os.urandom(32)
            for h in range(self.hosts):
                self.file(h, SECRET).touch(0o600)
                self.file(h, SECRET).write_bytes(secret)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all that runs on the hosts, and removes the box."""
        for one in self._started:  # nsenter stops with its command, and would never reap it
            one.send_signal(signal.SIGCONT)
        while self._cages:
            self._cages.pop().close()

    # -- what runs on the hosts

    def words(self, host: int, command: Sequence[object]) -> list[str]:
        """The command line that runs a command on a host, in this folder."""
        folder = os.getcwd()
        if any(f"{folder}/".startswith(f"{own}/") for own in OWN):
            folder = "/tmp"
        return [*self._cages[host].enter(), "env", "-C", folder, *map(str, command)]

    def environment(self, host: int) -> dict[str, str]:
        """The variables of a command: who the host is, and a cache of its own."""
        facts = {"HOST": host, "HOSTS": self.hosts, "HEAD": address(0), "ADDRESS": address(host)}
        return {f"BOX_{name}": str(value) for name, value in facts.items()} | {
            "HOWDAH_CACHE": "/tmp/cache",
            "HOWDAH_SECRET_FILE": SECRET,
        }

    def start(
        self, host: int, command: Sequence[object], env: Mapping[str, str] | None = None, **how: Any
    ) -> subprocess.Popen[Any]:
        """Starts a command on a host; `how` is for Popen."""
        given = {**os.environ, **self.environment(host), **(env or {})}
        self._started.append(subprocess.Popen(self.words(host, command), env=given, **how))
        return self._started[-1]

    def run(self, host: int, command: Sequence[object]) -> str:
        """What a command on a host prints. Raises CalledProcessError."""
        given = {**os.environ, **self.environment(host)}
        words = self.words(host, command)
        done = subprocess.run(words, env=given, capture_output=True, text=True, check=True)
        return done.stdout

    def file(self, host: int, path: str | Path) -> Path:
        """A path of a host, as this process reaches it while the box is there."""
        return Path(f"/proc/{self._cages[host].first}/root{path}")

    def sent(self, host: int) -> int:
        """Bytes that the host's card has sent so far, with all headers."""
        return self._counted(self._cages[host], CARD)[8]

    def received(self, host: int) -> int:
        """Bytes that it has received so far."""
        return self._counted(self._cages[host], CARD)[0]

    def carried(self, wire: Wire) -> list[int]:
        """Bytes that a wire has carried so far, from its first end to its second and back."""
        near, far = wire.ends
        return self._counted(self._cages[-1], f"{far}-{near}")[::8]

    def _counted(self, cage: Cage, device: str) -> list[int]:
        """The counters of a device: 0 is what it has received, 8 what it has sent."""
        table = Path(f"/proc/{cage.first}/net/dev").read_text("utf-8")
        row = next(line for line in table.splitlines() if line.strip().startswith(f"{device}:"))
        return [int(word) for word in row.partition(":")[2].split()[:9]]

    # -- what a test or a benchmark does to the network

    def tc(self, host: int, line: str) -> None:
        """Runs a line of `tc` on a host's network."""
        self._cages[host].batch("tc", [line])

    def ip(self, host: int, line: str) -> None:
        """Runs a line of `ip` on a host's network."""
        self._cages[host].batch("ip", [line])

    def unplug(self, host: int) -> None:
        """Takes the cable out of a host's card."""
        self.ip(host, f"link set {CARD} down")

    def plug(self, host: int) -> None:
        """Puts it in again; a card that was down has forgotten the others."""
        self.ip(host, f"link set {CARD} up")
        for other in range(self.hosts):
            if other != host:
                there = f"{address(other)} lladdr {hardware(other)}"
                self.ip(host, f"neigh replace {there} nud permanent dev {CARD}")

    def mute(self, host: int) -> None:
        """Drops what a host sends; it still hears."""
        self.tc(host, f"qdisc replace dev {CARD} root pfifo limit 0")

    def end(self, host: int) -> None:
        """Ends a host: its processes, and its network."""
        self._cages[host].close()

    # -- building

    def _connect(self) -> None:
        *cages, fabric = self._cages
        names, found = switches(self.profile, self.hosts), wires(self.profile, self.hosts)
        fabric.batch("ip", [*self._plugged(names, found)])
        fabric.batch("bridge", [*self._known(found)])
        for wire in found:
            near, far = wire.ends
            fabric.batch("tc", [shaped(f"{far}-{near}", wire.rate)])
            if not near.startswith("host"):
                fabric.batch("tc", [shaped(f"{near}-{far}", wire.rate)])
        for h, host in enumerate(cages):
            host.batch("ip", self._own(h))
            host.batch("tc", [shaped(CARD, card_rate(self.profile, h))])

    def _plugged(self, names: Sequence[str], found: Sequence[Wire]) -> list[str]:
        """Lines of `ip` on the network of the switches: bridges, and wires with both ends in."""
        lines = [f"link add {name} type bridge" for name in names]
        for near, far in (wire.ends for wire in found):
            here, there = f"{far}-{near}", f"{near}-{far}"
            if near.startswith("host"):
                there = f"{CARD} netns {self._cages[int(near[4:])].first}"
            lines += [f"link add {here} type veth peer name {there}"]
            lines += [f"link set {here} master {far} up"]
            if not near.startswith("host"):
                lines += [f"link set {there} master {near} up"]
        return [*lines, *(f"link set {name} up" for name in names)]

    def _known(self, found: Sequence[Wire]) -> list[str]:
        """Lines of `bridge`: who is behind which port; none floods or learns."""
        lines, profile = [], self.profile
        for near, far in (wire.ends for wire in found):
            ports = [f"{far}-{near}", *([] if near.startswith("host") else [f"{near}-{far}"])]
            silent = "flood off mcast_flood off bcast_flood off learning off"
            lines += [f"link set dev {port} {silent}" for port in ports]
        names = switches(profile, self.hosts)
        for h in range(self.hosts):
            own, spine = f"leaf{leaf_of(profile, h)}", ""
            ports = [f"{own}-host{h}"]
            if len(names) > 1:
                spine = f"spine{spine_to(profile, h)}"
                leaves = [name for name in names if name.startswith("leaf") and name != own]
                ports += [f"{spine}-{own}", *(f"{leaf}-{spine}" for leaf in leaves)]
            lines += [f"fdb add {hardware(h)} dev {port} master static" for port in ports]
        return lines

    def _own(self, host: int) -> list[str]:
        """Lines of `ip` on a host's network: its address, and those of all others."""
        others = (h for h in range(self.hosts) if h != host)
        return [
            "link set lo up",
            f"link set {CARD} address {hardware(host)} arp off up",
            f"addr add {address(host)}/24 dev {CARD}",
            *(
                f"neigh add {address(h)} lladdr {hardware(h)} nud permanent dev {CARD}"
                for h in others
            ),
        ]


def shaped(device: str, rate: int) -> str:
    """The line of `tc` by which a device sends `rate` Mbit/s. The bucket holds what goes out in two
    milliseconds: with half of one, a wire of 1 Gbit/s reached 0.45 of it, for timers come late. So
    what is timed must be many times as long.
    """
    burst = max(rate * 250, LEAST_BURST)
    return f"qdisc replace dev {device} root tbf rate {rate}mbit burst {burst} latency {QUEUE}"
