"""docs/how-to/containers.md, the Dockerfile and the manifests: what can be known of them without a
cluster. Their commands are run on a container and pods by hand in tests/cluster/test_containers.py.
"""

import re
import shlex
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml
from test_docs import blocks, check_command

from howdah.base.errors import UserError
from howdah.cli.train import SAVE_SECONDS

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "how-to" / "containers.md").read_text("utf-8")
MANIFESTS = [[*yaml.safe_load_all(one.body)] for one in blocks(PAGE, language="yaml")]
JOBS = {job["metadata"]["name"]: job for job in (docs[-1] for docs in MANIFESTS)}


def pod_of(job):
    return job["spec"]["template"]["spec"]


def container_of(job):
    (container,) = pod_of(job)["containers"]
    return container


def command_of(job):
    """The words of the last command that the container runs: howdah's or torchrun's."""
    command, more = container_of(job)["command"], container_of(job).get("args", [])
    if command != ["sh", "-c"]:
        return [*command, *more]
    (line,) = more
    return shlex.split(line.rpartition("exec ")[2])


def set_up(words):
    """The same words with what the pod's environment fills in."""
    return shlex.join("0" if word == "$JOB_COMPLETION_INDEX" else word for word in words)


def after(words, option):
    return words[words.index(option) + 1]


@pytest.mark.parametrize("name", JOBS)
def test_a_job_starts_what_howdah_takes(name):
    check_command(set_up(command_of(JOBS[name])))
    wrong = [
        word.replace("layout=", "lay=").replace("folder=", "fol=")
        for word in command_of(JOBS[name])
    ]
    with pytest.raises(UserError, match="unknown key"):
        check_command(set_up(wrong))


@pytest.mark.parametrize("name", JOBS)
def test_a_job_has_what_a_container_must_allow(name):
    job, pod, container = JOBS[name], pod_of(JOBS[name]), container_of(JOBS[name])
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    assert pod["restartPolicy"] in ("OnFailure", "Never")  # a Job may have no other
    assert pod["terminationGracePeriodSeconds"] > SAVE_SECONDS
    assert not pod["automountServiceAccountToken"]
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounted.keys() == {volume["name"] for volume in pod["volumes"]}
    assert {mounted["work"], mounted["tmp"]} == {"/data", "/tmp"}
    assert container["securityContext"]["readOnlyRootFilesystem"]


def test_pods_meet_at_the_first_of_them():
    (service, job), words = MANIFESTS[1], command_of(JOBS["pods"])
    spec, name = job["spec"], job["metadata"]["name"]
    assert spec["completionMode"] == "Indexed"  # without it there is no JOB_COMPLETION_INDEX
    assert spec["completions"] == spec["parallelism"] == int(after(words, "--nnodes"))
    assert service["spec"]["selector"] == {"job-name": name}
    assert service["spec"]["clusterIP"] == "None"  # a translated address cannot join
    assert service["metadata"]["name"] == pod_of(job)["subdomain"]
    assert after(words, "--master-addr") == f"{name}-0.{pod_of(job)['subdomain']}"
    assert int(after(words, "--shutdown-timeout")) == SAVE_SECONDS
    cores = container_of(job)["resources"]["limits"]["cpu"]
    assert after(words, "--nproc-per-node") == cores


def test_pods_have_a_secret_of_their_own():
    container, pod = container_of(JOBS["pods"]), pod_of(JOBS["pods"])
    (line,) = container["args"]
    start, copied = shlex.split(line.partition("&&")[0])[:3], shlex.split(line)[3:5]
    assert start == ["install", "-m", "600"]
    assert container["env"] == [{"name": "HOWDAH_SECRET_FILE", "value": copied[1]}]
    mount = next(one for one in container["volumeMounts"] if one["name"] == "secret")
    assert copied[0] == f"{mount['mountPath']}/secret"
    names = [one["secret"]["secretName"] for one in pod["volumes"] if "secret" in one]
    made = re.search(r"kubectl create secret generic (\w+) --from-file=(\w+)", PAGE)
    assert names == [made[1]] and made[2] == "secret"


def test_commands_in_a_container_are_howdahs():
    lines = re.findall(r"^docker run .* howdah (howdah .*)$", PAGE, re.M)
    assert len(lines) == 3
    for line in lines:
        check_command(line)
    assert int(re.search(r"--stop-timeout (\d+)", PAGE)[1]) == SAVE_SECONDS


# -- the image -------------------------------------------------------------------------


def instructions():
    """(instruction, its words) of the Dockerfile, without comments."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text("utf-8"), flags=re.M)
    for line in text.replace("\\\n", " ").splitlines():
        if line.strip():
            kind, _, words = line.partition(" ")
            yield kind, words.split()


def is_sent(name):
    """Whether .dockerignore lets a file into the build: the last pattern that fits decides."""
    sent = True
    for pattern in (ROOT / ".dockerignore").read_text("utf-8").split():
        plain = pattern.removeprefix("!")
        parts = [name, *map(str, Path(name).parents)]
        if any(fnmatch(part, plain.replace("**/", "*")) for part in parts):
            sent = pattern.startswith("!")
    return sent


def test_the_image_copies_what_is_there():
    copied = [words[:-1] for kind, words in instructions() if kind == "COPY"]
    names = [
        name.rstrip("/") for words in copied if not words[0].startswith("--") for name in words
    ]
    assert {"howdah", "tools/wheel.py", "constraints.txt"} < {*names}
    for name in names:
        assert (ROOT / name).exists() and is_sent(name), name
    assert is_sent("howdah/comm/engine.c") and not is_sent("howdah/comm/_engine.so")
    assert not is_sent(".venv/bin/python") and not is_sent("runs/mine/log.txt")
    assert not is_sent("howdah/comm/__pycache__/arena.pyc")


def test_the_image_has_the_wheel_and_its_versions():
    """What tools/wheel.py needs to be copied is what it copies; tests/test_wheel.py runs it."""
    runs = [" ".join(words) for kind, words in instructions() if kind == "RUN"]
    assert any("python tools/wheel.py /wheels" in line for line in runs)
    copied = {n for kind, words in instructions() if kind == "COPY" for n in words}
    needed = re.search(r"^FILES = \((.*)\)$", (ROOT / "tools/wheel.py").read_text("utf-8"), re.M)
    assert {*re.findall(r'"([^"]+)"', needed[1])} < copied
    installs = [part for line in runs for part in re.split("&&|;", line) if "pip install" in part]
    assert len(installs) == 3 and all(
        "-c " in part and "constraints.txt" in part for part in installs
    )
    pinned = (ROOT / "constraints.txt").read_text("utf-8")
    assert re.search(r"^setuptools==", pinned, re.M) and re.search(r"^wheel==", pinned, re.M)
    (kept,) = [words for kind, words in instructions() if kind == "ENV"]
    assert "HOWDAH_CACHE=/data/cache" in kept and "| `HOWDAH_CACHE` | `/data/cache`" in PAGE
