"""Run folders that machines do not share: saved in parts, gone on with on other machines.

The machines are made up: each rank says that it runs on another than it does, and has a folder of
its own. All else is real: what one machine needs of another's goes through gloo.
"""

import json
import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch
from uuid import uuid4

import pytest
import torch.distributed as dist
from small_runs import RECIPE, assert_same_bits, forget, losses, tensors, train_on

from howdah.base.errors import UserError
from howdah.checkpoint.folders import step_folder, steps
from howdah.checkpoint.gather import bring, choose_apart, transfers
from howdah.checkpoint.load import open_checkpoint
from howdah.checkpoint.sites import Board, Team
from howdah.comm.group import Group
from howdah.comm.rendezvous import choose
from howdah.config.recipe import Machine, load_run, resolve_run
from howdah.train.console import RunConsole
from howdah.train.loop import train
from howdah.train.start import prepare_start, prepare_tokens

MIDDLE, LAST = 4, 8  # steps that are saved


def train_apart(transport, job, machines, name, shared):
    """For workers: trains on a machine of the rank's own; those that are `shared` have one folder
    below the job's, all others one each. Returns what was said, and the mistake if it is one.
    """
    machine, said = machines[transport.rank], []
    store = dist.PrefixStore(name, transport.among.aside)
    folder = job.folder / ("shared" if machine in shared else machine)
    with (
        patch("howdah.comm.meeting.this_machine", lambda: machine),
        patch("platform.node", lambda: f"host-{machine}"),
        patch.object(RunConsole, "say", lambda self, line: said.append(line)),
        closing(choose(store, rank=transport.rank, size=transport.size, secret=b"s" * 32)) as wire,
    ):
        sources = tuple(
            replace(source, path=source.path.replace("MACHINE", machine))
            for source in job.data.sources
        )
        try:
            train(replace(job, folder=folder, data=replace(job.data, sources=sources)), wire)
        except UserError as mistake:  # of all ranks: they stay in step
            said.append(str(mistake))
    return said


def on(workers, job, machines, shared=""):
    """Trains; returns what rank 0 said."""
    ranks = len(machines)
    return workers.run(train_apart, job, machines, uuid4().hex, shared, ranks=ranks)[0]


def files(folder, step=LAST):
    return sorted(path.name for path in step_folder(folder / "checkpoints", step).iterdir())


def forget_last(job, machines):
    """Leaves a run as it was when it died on the way to its last step."""
    for machine in machines:
        forget(job.folder / machine, LAST)


@pytest.fixture(scope="module")
def make(text, cache, tmp_path_factory):
    """Makes a job of a few steps in a new folder."""
    folder = tmp_path_factory.mktemp("apart")
    (folder / "small.toml").write_text(RECIPE.format(text=text))
    machine = Machine(world=None, local_world=None, cores=1, cuda=0, cache=cache)

    def made(name, *overrides):
        few = [f"train.steps={LAST}", f"train.save_every={MIDDLE}", f"folder={folder / name}"]
        return resolve_run(load_run(folder / "small.toml", [*few, *overrides]), machine)

    return made


@pytest.fixture(scope="module")
def whole(workers, make):
    """A run on machines a and b, two ranks each, with nothing shared."""
    job = make("whole", "layout=dp2 tp2", "train.export=true")
    on(workers, job, "aabb")
    return job


@pytest.fixture
def half(whole, tmp_path):
    """The same run when it had come half the way, in a folder of its own."""
    job = replace(whole, folder=tmp_path / "half")
    shutil.copytree(whole.folder, job.folder)
    forget_last(job, "ab")
    return job


def test_each_machine_keeps_its_ranks_files_and_rank_0s_ends_with_all(workers, make, whole):
    ranks = [f"rank-0000{rank}.safetensors" for rank in range(4)]
    a, b = whole.folder / "a", whole.folder / "b"
    assert files(a, MIDDLE) == ["index.json", *ranks[:2]] and files(a) == ["index.json", *ranks]
    assert files(b, MIDDLE) == files(b) == ["index.json", *ranks[2:]]
    assert (a / "export").is_dir() and not (b / "export").exists()
    assert (a / "tokenizer.json").read_bytes() == (b / "tokenizer.json").read_bytes()
    assert (a / "metrics.jsonl").exists() and not (b / "metrics.jsonl").exists()
    alone = make("alone", "layout=dp2 tp2")
    train_on(workers, alone)
    assert_same_bits(tensors(alone.folder, LAST), tensors(a, LAST))
    assert losses(alone.folder) == losses(a)
    index = json.loads((step_folder(b / "checkpoints", MIDDLE) / "index.json").read_text())
    assert [file["host"] for file in index["files"]] == ["host-a"] * 2 + ["host-b"] * 2


@pytest.mark.parametrize(
    ("layout", "machines"),
    [
        ("dp3", "abc"),  # a new one, with nothing
        pytest.param("dp2 tp2", "bbaa", marks=pytest.mark.slow),
        pytest.param("dp2 zero3", "ba", marks=pytest.mark.slow),  # rank 0 elsewhere
        pytest.param("pp2", "ab", marks=pytest.mark.slow),
        pytest.param("dp2", "cb", marks=pytest.mark.slow),  # a's folder was copied to c
    ],
)
def test_a_run_goes_on_on_other_machines(  # noqa: PLR0917
    workers, make, half, whole, layout, machines
):
    if "c" in machines and "a" not in machines:
        (half.folder / "a").rename(half.folder / "c")
    job = replace(make("other", f"layout={layout}"), folder=half.folder)
    said = on(workers, job, machines)
    assert f"going on from step {MIDDLE}, saved on dp2 tp2 x1" in said
    assert any(line.startswith("brought ") for line in said)
    here, there = tensors(half.folder / machines[0], LAST), tensors(whole.folder / "a", LAST)
    if layout == "dp2 tp2":
        assert_same_bits(here, there)
    for name, tensor in there.items():
        assert (here[name] - tensor).abs().max() <= 1e-4 * tensor.abs().max() + 1e-6, name


@pytest.mark.slow
def test_a_stage_needs_the_files_of_its_own_layers(workers, make):
    job = make("stages", "layout=pp2")
    on(workers, job, "ab")
    forget_last(job, "ab")
    assert not any(line.startswith("brought") for line in on(workers, job, "ab")[:9])
    assert files(job.folder / "b") == ["index.json", "rank-00001.safetensors"]


def test_what_no_machine_has_is_told(workers, make, half):
    shutil.rmtree(half.folder / "b")
    job = replace(make("other", "layout=dp2"), folder=half.folder)
    lacks = f"step {MIDDLE} lacks rank-00002.safetensors of host host-b and 1 more files; start on"
    assert lacks in on(workers, job, "ac")[-1]
    here = replace(half, folder=half.folder / "a")
    corpus = prepare_tokens(here, lambda line: None)
    prepare_start(here, corpus, parts=True)  # others may have the rest
    with pytest.raises(UserError, match=r"other machines have parts .* rank-00002.* of host-b"):
        prepare_start(here, corpus)


@pytest.mark.slow
def test_a_damaged_file_is_brought_from_a_machine_that_has_it(workers, make, half):
    job = replace(make("other", "layout=dp2"), folder=half.folder)
    on(workers, job, "ab")  # both have all of the middle step now
    forget_last(job, "ab")
    before = tensors(job.folder / "b", MIDDLE)
    path = step_folder(job.folder / "b" / "checkpoints", MIDDLE) / "rank-00002.safetensors"
    sound = path.read_bytes()
    path.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    on(workers, job, "ab")
    assert path.read_bytes() == sound
    assert_same_bits(before, tensors(job.folder / "b", MIDDLE))


def test_a_damaged_index_is_written_again(workers, half):
    damaged = step_folder(half.folder / "b" / "checkpoints", MIDDLE) / "index.json"
    damaged.write_bytes(damaged.read_bytes()[:50])
    said = on(workers, half, "aabb")
    assert any(line.startswith(f"going on from step {MIDDLE}") for line in said)
    assert (
        damaged.read_bytes()
        == (step_folder(half.folder / "a" / "checkpoints", MIDDLE) / "index.json").read_bytes()
    )


@pytest.mark.slow
def test_machines_with_other_checkpoints_of_one_step_are_refused(workers, make, half):
    """Each whole by itself: which of them is the run's, nobody can tell."""
    other = make("another", "layout=dp2", "seed=2", f"train.steps={MIDDLE}")
    on(workers, other, "bb")
    for machine in "ab":
        shutil.copytree(half.folder / machine, half.folder / "c", dirs_exist_ok=True)
    shutil.rmtree(half.folder / "b")
    shutil.copytree(other.folder / "b", half.folder / "b")
    said = on(workers, replace(make("other", "layout=dp2"), folder=half.folder), "cb")
    assert f"hosts have different checkpoints of step {MIDDLE} in " in said[-1]


def test_text_that_differs_is_named_by_what_it_holds(workers, make, text, tmp_path):
    """Not by its folder, nor by the times of its files."""
    for machine in "abc":
        shutil.copytree(text, tmp_path / machine, copy_function=shutil.copyfile)
    path = tmp_path / "c" / "3.txt"
    path.write_text(path.read_text().replace("follows", "is after"))
    source = f'data.sources=["{tmp_path}/MACHINE"]'
    said = on(workers, make("text", "layout=dp2", source, "train.steps=1"), "ab")
    assert any(line.startswith("plan") for line in said)
    said = on(workers, make("others", "layout=dp2", source), "ac")
    told = f"rank 1 on host-c and rank 0 on host-a have other contents in data.sources {tmp_path}/a"
    assert said[-1] == f"the ranks have different text: {told}; give all machines the same files"


@pytest.mark.slow
def test_bytes_brought_are_those_of_the_files(workers, half):
    """Predicted from the index, counted where they are sent."""
    told = workers.run(bring_counted, half.folder / "{}" / "checkpoints", uuid4().hex, ranks=2)
    for rank, (predicted, counted) in enumerate(told):
        assert predicted == counted > 0, rank


def bring_counted(transport, folder, name):
    """For workers: brings all files to both machines; the bytes that this rank should send, and
    those that it sent.
    """
    store = dist.PrefixStore(name, transport.among.aside)
    machine = "ab"[transport.rank]
    folder = Path(str(folder).format(machine))
    with (
        patch("howdah.comm.meeting.this_machine", lambda: machine),
        closing(choose(store, rank=transport.rank, size=2, secret=b"s" * 32)) as wire,
        closing(Group(wire)) as world,
    ):
        team = Team(transport.rank, (0, 1), Board(wire.among.aside))
        found = choose_apart(folder, world, team, print)
        every = {rank: [file.name for file in found.index.files] for rank in (0, 1)}
        mine = [file.bytes for file, source, _ in transfers(found, every) if source == world.rank]
        total = bring(folder, found, world, team, every)
        assert total == sum(file.bytes for file, *_ in transfers(found, every))
        assert open_checkpoint(step_folder(folder, found.index.step)).verify() == []
        sent = world.counters.sent()
    return sum(mine), sum(n for row, n in sent.items() if row.operation == "send")


def test_a_folder_that_some_machines_share_is_refused(workers, make):
    said = on(workers, make("some", "layout=dp3"), "abc", shared="ab")
    assert "rank 1 sees the run folder" in said[-1]
    assert said[-1].endswith(
        "rank 2 does not: share it between all ranks of a machine, and between all machines or none"
    )


def test_a_shared_folder_is_as_it_was(workers, make):
    job, alone = make("shared", "layout=dp2"), make("not", "layout=dp2")
    on(workers, job, "ab", shared="ab")
    train_on(workers, alone)
    index = [
        step_folder(folder / "checkpoints", LAST) / "index.json"
        for folder in (job.folder / "shared", alone.folder)
    ]
    assert index[0].read_bytes() == index[1].read_bytes()
    assert files(job.folder / "shared") == files(alone.folder)


@pytest.mark.slow
def test_old_checkpoints_go_when_the_new_one_stands_everywhere(workers, make):
    job = make("one", "layout=dp2", "train.save_every=2", "train.keep_last=1")
    on(workers, job, "ab")
    assert [steps(job.folder / machine / "checkpoints") for machine in "ab"] == [[LAST]] * 2
