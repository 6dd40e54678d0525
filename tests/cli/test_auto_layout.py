"""`layout = "auto"`: the layout that is found, where it is written, and that it wins on resume."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest

from howdah.base.errors import UserError
from howdah.cli import auto
from howdah.comm.settings import cache_folder
from howdah.config.auto import _first_of, question_of
from howdah.config.recipe import Machine, load_run, plan_of
from howdah.machines.cluster_file import load_cluster
from howdah.plan.layout import parse_layout
from howdah.plan.support import unsupported
from howdah.search.capacity import Room, lacks
from howdah.search.search import search

HERE = Machine(None, None, cores=2, cuda=0, cache=None)


@pytest.fixture
def wish(recipe, cache, monkeypatch):
    """The small recipe with layout=auto and more keys, as a Run."""
    monkeypatch.setenv("HOWDAH_CACHE", str(cache.parent))
    return lambda *keys: load_run(recipe, ["layout=auto", *keys])


def test_what_was_found_is_trained_written_down_and_wins_on_resume(run, recipe, tmp_path):
    folder = tmp_path / "a"
    words = ("train", recipe, "layout=auto", "cluster=laptop-cpux1", f"folder={folder}")
    code, out, error = run(*words, "train.steps=2")
    assert code == 0, error
    (line,) = [one for one in out.splitlines() if one.startswith("layout ")]
    chosen = load_run(folder).layout
    assert re.match(rf"layout      {re.escape(chosen)}, (one of the \d+ fastest|first) of ", line)
    assert line and line in (folder / "log.txt").read_text()
    why = (folder / "layout.txt").read_text()
    assert chosen in why and "layouts of 1 x CPU core" in why and "note" in why
    saved = (folder / "run.toml").read_text()
    other = "single x1" if chosen != "single x1" else "single x2"
    micro = load_run(folder).batch.global_batch // int(other[-1])
    changed = saved.replace(f'layout = "{chosen}"', f'layout = "{other}"')
    changed = "\n".join(
        f"micro_batch = {micro}" if one.startswith("micro_batch") else one
        for one in changed.splitlines()
    )
    (folder / "run.toml").write_text(changed)
    code, out, error = run(*words, "train.steps=4")
    assert code == 0, error
    assert f"layout      {other}, with which {folder} has begun\n" in out
    assert load_run(folder).layout == other and "step:  4" in out
    assert (folder / "layout.txt").read_text() == why


def test_check_and_plan_answer_too(run, recipe, tmp_path):
    keys = ("layout=auto", "cluster=laptop-cpux2", f"folder={tmp_path / 'a'}")
    code, out, error = run("check", recipe, *keys)
    assert code == 0, error
    assert "sound: " in out and "\nlayout: " in out and re.search(r"(fastest|first) of \d", out)
    (found,) = [one for one in out.splitlines() if one.startswith("layout: ")]
    data = json.loads(run("plan", recipe, *keys[:2], "--json")[1])
    assert found.startswith(f"layout: {data['best'][0]['layout']}, ")
    elsewhere = json.loads(run("plan", recipe, *keys[:1], "--cluster", "h100x4", "--json")[1])
    assert elsewhere["best"][0]["devices"] == 4
    code, _, error = run("verify", recipe, "layout=auto")
    assert code == 2 and "only train, check and plan find a layout for it" in error


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (("cluster=nope",), "cluster 'nope' is unknown"),
        (("cluster=h100x12",), "so not 12"),
        (("model.heads=3",), "model.width"),
        (("batch.global_batch=0",), "batch.global_batch is 0"),
        (("cluster=p100x2", "method.precision=bf16"), "has no bf16 arithmetic"),
        (
            ("cluster=rtx-4090", "model.layers=900", "model.width=8192"),
            "layout=auto: no layout",
        ),
    ],
)
def test_what_cannot_be_searched_is_one_sentence(run, recipe, keys, said):
    code, _, error = run("check", recipe, "layout=auto", *keys)
    assert code == 2 and said in error and error.count("\n") == 1


def test_only_what_can_be_run_here_is_chosen(wish):
    """Of a machine whose memory is full, nothing; else what `train` takes without --force."""
    run = wish()
    found = auto.settled(run, HERE)
    layout = parse_layout(found.run.layout)
    assert layout.world == 2 and unsupported(run.model, layout) == []
    assert auto.settled(run, HERE) == found  # the same at every call
    launched = replace(HERE, world=1, local_world=1)
    assert parse_layout(auto.settled(run, launched).run.layout).world == 1
    assert auto.settled(wish("batch.micro_batch=2"), HERE).run.batch.micro_batch == 2


@pytest.mark.slow
def test_a_layout_that_this_machine_cannot_hold_is_not_chosen(wish, monkeypatch):
    run = wish("model.layers=12", "model.width=512", "model.ffn_size=2048")
    monkeypatch.setattr(auto, "free_memory", lambda: 2 * 10**9)
    found = auto.settled(run, HERE)
    assert auto.FULL in "\n".join(found.why)
    plan = plan_of(found.run, parse_layout(found.run.layout))
    assert lacks(plan, Room(2 * 10**9, 2, 2)) == []
    monkeypatch.setattr(auto, "free_memory", lambda: 10**6)
    with pytest.raises(UserError, match="than this machine has free"):
        auto.settled(run, HERE)


def test_no_layout_is_said_to_be_the_fastest_within_the_error_of_the_times(wish):
    """It said "fastest of 360" whatever the error."""
    question = question_of(wish(), load_cluster("laptop-cpux2"), micro_batch=1)
    found = search(question)
    first = found.best[0]
    others = [one for one in found.best if one.seconds > first.seconds]
    behind, last = others[0].seconds / first.seconds, others[-1].seconds / first.seconds
    assert 1 < behind < last

    def off_by(spread):
        time = replace(first.time, profile=replace(first.time.profile, spread=spread))
        one = replace(found, best=(replace(first, time=time), *others))
        return _first_of(one), one.alike

    compared = f"{found.compared:,}"
    assert off_by(0.0) == (f"first of {compared}", 0)
    assert off_by((1 + behind) / 2) == (f"fastest of {compared}", 1)
    assert off_by(last + 1e-9) == (
        f"one of the {1 + len(others)} fastest of {compared}",
        1 + len(others),
    )


def test_several_machines_without_a_named_cluster_are_refused(wish):
    apart = replace(HERE, world=4, local_world=2)
    with pytest.raises(UserError, match="name the cluster in the recipe"):
        auto.cluster_of(wish(), apart)
    assert auto.cluster_of(wish("cluster=h100"), apart)[0].devices == 4


def test_the_cards_of_this_machine_are_those_of_a_shipped_cluster(wish, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA GeForce RTX 4090")
    cluster, note = auto.cluster_of(wish(), replace(HERE, cuda=3))
    assert (cluster.device.name, cluster.devices) == (
        "RTX 4090",
        3,
    ) and "howdah cluster new" in note
    assert auto.cluster_of(wish("device=cpu"), replace(HERE, cuda=3))[0].devices == 2
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Chip 1")
    with pytest.raises(UserError, match="does not know 'Chip 1'"):
        auto.cluster_of(wish(), replace(HERE, cuda=3))


RANKS = """
import os, sys
from howdah.base.errors import UserError
from howdah.comm.announce import announce

def decide():
    if "fail" in sys.argv:
        raise UserError("nothing fits")
    return f"found by {os.environ['RANK']}"

try:
    print(announce(decide, first=os.environ["RANK"] == "0")[0])
except UserError as problem:
    print(f"refused: {problem}")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"), [([], "found by 0"), (["fail"], "refused: nothing fits")]
)
def test_rank_0_decides_for_all(tmp_path, words, said):
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    ended = subprocess.run([*torchrun, script, *words], capture_output=True, text=True, check=False)
    heard = ended.stdout.replace("\n", "")  # lines of ranks may run into each other
    assert heard == said * 3, ended.stderr


def test_a_damaged_measurement_is_told_and_one_that_is_missing_is_not_needed(wish):
    machine = replace(HERE, cores=3)
    assert auto.cluster_of(wish(), machine)[0].name == "this machine"
    folder = cache_folder() / "clusters"
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("here.toml", "here-3.toml"):
        (folder / name).write_text("name = 3")
    try:
        with pytest.raises(UserError, match=r"here-3\.toml"):
            auto.cluster_of(wish(), machine)
    finally:
        shutil.rmtree(folder)
