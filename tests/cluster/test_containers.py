"""A container by hand, and the pods of docs/how-to/containers.md on hosts of a box.

The container has what Docker and Kubernetes give: process 1 of its own process numbers, a root that
cannot be written, a small /dev/shm, a user without name and home, and control groups with limits.
"""

import json
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from small_runs import RECIPE

pytestmark = [pytest.mark.root, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "containers.md").read_text("utf-8")
SOMEBODY = 54_321  # a user whom /etc/passwd does not know
GROUPS = {  # files of both versions of control groups: one core, and so many bytes
    "cpu.max": "100000 100000",
    "memory.max": "{memory}",
    "cpu/cpu.cfs_quota_us": "100000",
    "cpu/cpu.cfs_period_us": "100000",
    "memory/memory.limit_in_bytes": "{memory}",
}
STAGE = "/dev/shm"


def closed_above(path):
    """The highest folder above `path` that other users cannot enter, or /tmp; None if none is."""
    for folder in [*reversed(path.parents), path]:
        if folder == Path("/tmp") or not folder.stat().st_mode & stat.S_IXOTH:
            return folder
    return None


def steps(work, memory):
    """Shell lines that make a container of new namespaces, in which `work` can be written."""
    seen = {ROOT, Path(sys.prefix), Path(sys.base_prefix).resolve(), work}
    hidden = {path: closed_above(path) for path in sorted(seen) if closed_above(path)}
    yield f"mount -t tmpfs tmpfs {STAGE}"
    for number, path in enumerate(hidden):
        yield f"mkdir {STAGE}/{number} && mount --bind {path} {STAGE}/{number}"
    for top in sorted({Path("/tmp"), *hidden.values()}):
        yield f"mount -t tmpfs -o mode={'1777' if top == Path('/tmp') else '755'} tmpfs {top}"
    for number, path in enumerate(hidden):
        yield f"mkdir -p {path} && mount --bind {STAGE}/{number} {path}"
    yield "mount -t tmpfs tmpfs /sys/fs/cgroup"
    for name, text in GROUPS.items():
        file = Path("/sys/fs/cgroup", name)
        yield f"mkdir -p {file.parent} && echo {text.format(memory=memory)} >{file}"
    yield f"mount -t tmpfs -o size=64k,ro tmpfs {STAGE}"
    yield "mount -o remount,ro,bind /"
    yield "ip link set lo up"
    yield f"cd {work}"


@pytest.fixture
def container(tmp_path):
    """Starts a command in a container with so many bytes of memory; the process outside of it."""
    if os.geteuid() or not all(map(shutil.which, ("unshare", "setpriv", "ip"))):
        pytest.skip("a container needs root, unshare, setpriv and ip")
    work = tmp_path / "work"
    (work / "text").mkdir(parents=True)
    for name in range(4):
        lines = [f"{n} follows {n - 1}, says {name}" for n in range(400)]
        (work / "text" / f"{name}.txt").write_text("\n".join(lines))
    (work / "small.toml").write_text(RECIPE.format(text="text"))
    os.chown(work, SOMEBODY, SOMEBODY)
    kinds = ("mount", "pid", "ipc", "uts", "net")
    as_user = f"setpriv --reuid {SOMEBODY} --regid {SOMEBODY} --clear-groups --no-new-privs"
    started = []

    def start(*words, memory=2 << 30):
        given = {"PATH": os.environ["PATH"], "HOME": "/", "HOWDAH_CACHE": str(work / "cache")}
        bare = shlex.join(["env", "-i", *(f"{name}={value}" for name, value in given.items())])
        last = f"exec {as_user} --inh-caps=-all {bare} {shlex.join(words)}"
        script = "\n".join(["set -e", *steps(work, memory), last])
        outer = ["unshare", *(f"--{kind}" for kind in kinds), "--fork", "--mount-proc"]
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started.append(subprocess.Popen([*outer, "sh", "-c", script], **pipe))
        return started[-1]

    start.work = work
    yield start
    for run in started:
        if run.poll() is None:
            os.kill(first_of(run), signal.SIGKILL)
            run.communicate()


def first_of(run):
    """The process outside of a container that is process 1 in it."""
    return int(Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()[0])


def howdah(*words):
    return [sys.executable, "-m", "howdah", *words]


def test_a_container_is_seen_as_it_is(container):
    told = container(*howdah("doctor")).communicate()[0]
    assert "quota 1\n" in told and "limit 2.0 GiB" in told, told
    run = container(*howdah("check", "small.toml", "layout=dp2"), memory=200 << 20)
    told = run.communicate()[0]
    assert run.returncode == 2 and "this machine has free for 2 ranks 104.9 MB each" in told, told


def test_a_run_in_a_container_is_stopped_and_goes_on(container):
    """As process 1, without a name, a home and a /dev/shm; threads=0 divides the quota."""
    words = ["train", "small.toml", "threads=0", "layout=single", "train.steps=3"]
    told = container(*howdah(*words, "folder=runs/one")).communicate()[0]
    assert "held-out at step 3" in told, told
    peaks = container.work.glob("cache/howdah/peaks/*.json")
    assert [json.loads(one.read_text())["facts"]["threads"] for one in peaks] == [1]

    run = container(*howdah("train", "small.toml", "layout=dp2", "train.steps=1000000"))
    said = []
    for line in run.stdout:
        said.append(line)
        if line.startswith("step:"):
            break
    os.kill(first_of(run), signal.SIGTERM)
    told = "".join(said) + run.communicate()[0]
    stopped = re.search(r"stopped after step (\d+) of 1000000 and saved", told)
    assert run.returncode == 128 + signal.SIGTERM and stopped, told
    steps = f"train.steps={int(stopped[1]) + 2}"
    run = container(*howdah("train", "runs/small", steps))
    told = run.communicate()[0]
    assert run.returncode == 0 and f"going on from step {stopped[1]}" in told, told
    assert os.stat(container.work / "runs" / "small" / "log.txt").st_uid == SOMEBODY


# -- pods ------------------------------------------------------------------------------


def test_the_pods_of_the_page_train(box):
    """The command of the Job on two hosts: each copies a secret that is root's and its group's."""
    _, job = yaml.safe_load_all(re.findall(r"```yaml\n(.*?)```", PAGE, re.S)[1])
    (pod,) = job["spec"]["template"]["spec"]["containers"]
    (line,) = pod["args"]
    names = {
        "/secret/secret": "/tmp/mounted/secret",
        "pods-0.pods": "host0",
        "exec torchrun": f"exec {sys.executable} -m torch.distributed.run",
        "train laptop": "train small.toml train.steps=4",
        "/tmp/secret": "/tmp/own",
    }
    for theirs, ours in names.items():
        assert theirs in line
        line = line.replace(theirs, ours)
    env = {one["name"]: one["value"].replace("/tmp/secret", "/tmp/own") for one in pod["env"]}
    secret = os.urandom(32)
    with box("flat-10g", 2) as cluster:
        runs = []
        for host in range(2):
            work = cluster.file(host, "/tmp/work")
            shutil.copytree(ROOT / "docs" / "how-to", work / "text")
            (work / "small.toml").write_text(RECIPE.format(text="text"))
            mounted = cluster.file(host, "/tmp/mounted")
            (mounted / "..data").mkdir(parents=True)
            (mounted / "..data" / "secret").write_bytes(secret)
            (mounted / "..data" / "secret").chmod(0o440)
            (mounted / "secret").symlink_to("..data/secret")
            given = {**env, "JOB_COMPLETION_INDEX": str(host), "OMP_NUM_THREADS": "1"}
            pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            shell = ["sh", "-c", f"cd /tmp/work; {line}"]
            runs.append(cluster.start(host, shell, env=given, **pipe))
        said = [run.communicate()[0] for run in runs]
        assert [run.returncode for run in runs] == [0, 0], said
        assert "on dp4 x1 (4 ranks)" in said[0] and ": equal" in said[0], said[0]
        assert cluster.sent(0) > 0 < cluster.sent(1)
