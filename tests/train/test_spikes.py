"""Losses that jump: left out or gone back from, alike on every layout and after a resume."""

import json
import random
import string
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_runs import (
    assert_same_bits,
    copy_until,
    losses,
    metrics,
    opened,
    tensors,
    train_on,
    train_watched,
)

from howdah.base.errors import UserError
from howdah.checkpoint.facts import Past
from howdah.plan.method import Spike
from howdah.text.sources import SHARE
from howdah.train.spikes import Spikes

POLICY = 'method.spike={{action = "{}", deviations = 0, ratio = 1.3, window = 4, most = 2}}'
HOW = ("train.steps=18", "train.save_every=4", "train.keep_last=99", "method.lr.warmup_steps=0")
BEFORE = 14  # documents before the noise
QUICK = ["dp2 zero3", "pp2"]
OTHERS = ["dp2", "dp3 zero2", "tp2", "single x3 optimizer=host"]


@pytest.fixture
def jumps(tmp_path):
    """Text that is read in its order: easy, then some samples of noise, then easy again."""
    words = "one two three four five six seven eight nine ten"
    easy = [f"{n} " + " ".join([words] * 12) for n in range(80)]
    noise = random.Random(1)
    hard = "".join(noise.choice(string.printable[:90]) for _ in range(300))
    rows = {"jumps": [*easy[:BEFORE], hard, *easy[BEFORE:]], "held": easy[:3]}
    for name, texts in rows.items():
        lines = [json.dumps({"text": f"{name} {text}"}) for text in texts]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    files = f'data.sources="{tmp_path}/jumps.jsonl"', f'data.validation="{tmp_path}/held.jsonl"'
    how = "data.order=sequential", f"data.validation_share={SHARE}"
    return *files, *how, "method.lr.peak=0.01", "method.lr.schedule=constant"


def apart(first, second):
    assert first.keys() == second.keys() and first
    return max(float((first[n] - second[n]).norm() / max(second[n].norm(), 1e-9)) for n in first)


def spike_lines(folder):
    lines = (Path(folder) / "log.txt").read_text().splitlines()
    return [line for line in lines if line.startswith("spike")]


def test_what_is_a_spike():
    """By deviations, by a ratio, by both; nothing until half of the window is there."""

    def decided(policy, losses):
        spikes = Spikes(policy, torch.device("cpu"))
        one = torch.tensor(1.0, dtype=torch.float64)
        made = [spikes.watch(torch.tensor(x, dtype=torch.float64), one) for x in losses]
        assert all(bool(w.square.isfinite()) is not bool(w.told[0]) for w in made)
        return [int(w.told[0]) for w in made], [float(w.told[1]) for w in made]

    inf = float("inf")
    by_ratio = Spike(deviations=0, ratio=1.5, window=4)
    assert decided(by_ratio, [9, 2, 2, 9, 3]) == ([0, 0, 0, 1, 0], [inf, inf, 8.25, 6.5, 8.25])
    by_deviation = Spike(deviations=2, window=8)
    found, limits = decided(by_deviation, [3, 5, 3, 5, 6.5, 6.2])
    assert found == [0, 0, 0, 0, 1, 0] and limits[4] == pytest.approx(4 + 2 * (4 / 3) ** 0.5)
    both = Spike(deviations=2, ratio=1.2, window=8)
    assert decided(both, [3, 5, 3, 5, 4.9])[0][-1] == 1


def test_a_window_is_taken_up_where_it_was():
    """With the same size bit by bit; another size keeps the latest losses."""
    policy, one = Spike(window=4), torch.tensor(1.0, dtype=torch.float64)
    first = Spikes(policy, torch.device("cpu"))
    numbers = [torch.tensor(x, dtype=torch.float64) for x in (0.1, 0.7, 0.3, 0.9, 0.5, 0.2)]
    for number in numbers[:5]:
        first.watch(number, one)
    past = first.past()
    assert past.losses == (0.5, 0.7, 0.3, 0.9) and past.seen == 5
    again = Spikes(policy, torch.device("cpu"), past)
    assert torch.equal(first.watch(numbers[5], one).told, again.watch(numbers[5], one).told)
    assert Spikes(Spike(window=8), torch.device("cpu"), past).past().losses == (0.7, 0.3, 0.9, 0.5)
    small = Spikes(Spike(window=4), torch.device("cpu"), Past((5.0, 1.0, 2.0, 3.0, 4.0), 11, 2))
    assert small.past() == Past((2.0, 3.0, 4.0, 5.0), 4, 2)


@pytest.mark.parametrize("layouts", [QUICK, pytest.param(OTHERS, marks=pytest.mark.slow)])
def test_an_update_is_left_out_alike_on_every_layout(workers, make_job, tmp_path, jumps, layouts):
    """Weights and moments stay as they are, and each step is counted and told."""
    how = (*HOW, *jumps, POLICY.format("skip"), "method.precision=float64")
    train_on(workers, make_job("one", *how, "train.save_every=1"))
    told = spike_lines(tmp_path / "one")
    assert told and all("is above" in line and "no update" in line for line in told)
    step = int(told[0].split("step ")[1].split(":")[0])
    before, after = tensors(tmp_path / "one", step - 1), tensors(tmp_path / "one", step)
    assert_same_bits(before, after)
    rows = metrics(tmp_path / "one")
    assert rows[step - 1]["spikes"] == 0 and rows[step]["spikes"] == 1
    assert rows[18]["spikes"] == len(told)
    assert opened(tmp_path / "one", 18).meta["spikes"]["count"] == len(told)
    for number, layout in enumerate(layouts):
        train_on(workers, make_job(f"{number}", *how, f"layout={layout}"))
        assert [line.split(":")[0] for line in spike_lines(tmp_path / f"{number}")] == [
            line.split(":")[0] for line in told
        ], layout
        ours = tensors(tmp_path / f"{number}", 18)
        assert apart(ours, tensors(tmp_path / "one", 18)) < 1e-9, layout


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("action", ["skip", "rollback"])
def test_a_resumed_run_decides_as_one_that_never_stopped(
    workers, make_job, tmp_path, jumps, action
):
    how = (*HOW, *jumps, POLICY.format(action), "layout=dp2 zero1")
    train_on(workers, make_job("a", *how))
    assert spike_lines(tmp_path / "a")
    for step in (8, 12):
        copy_until(tmp_path / "a", tmp_path / f"{step}", step)
        train_on(workers, make_job(f"{step}", *how))
        assert_same_bits(tensors(tmp_path / "a", 18), tensors(tmp_path / f"{step}", 18))
        assert losses(tmp_path / "a") == losses(tmp_path / f"{step}")
        metas = [opened(tmp_path / name, 18).meta["spikes"] for name in ("a", f"{step}")]
        assert metas[0] == metas[1]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "layout",
    [
        "single",
        "dp2 zero2",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("dp2 zero3", "pp2")),
        "single x3 optimizer=disk",
    ],
)
def test_a_run_goes_back_and_on_with_the_samples_behind(workers, make_job, tmp_path, jumps, layout):
    """The checkpoint's weights, with other samples: those behind the spike, none of them twice."""
    how = (*HOW, *jumps, POLICY.format("rollback"), f"layout={layout}")
    job = make_job("a", *how)
    seen = workers.run(train_watched, [job], ranks=job.layout.world)
    back = [line for line in spike_lines(tmp_path / "a") if "back to step" in line]
    assert back and "on with the samples behind step" in back[0]
    to, spike = (int(word) for word in back[0].replace(",", "").split() if word.isdigit())
    steps = [step for step, _, _ in seen[0]]
    at = next(i for i in range(1, len(steps)) if steps[i] <= steps[i - 1])
    assert (steps[at - 1], steps[at]) == (spike - 1, to)
    if layout == "single":
        used = [n for _, _, read in seen[0] for n, _ in read]
        assert len(used) == len(set(used)) and sorted(used) == used
    rows = metrics(tmp_path / "a")
    assert sorted(rows) == [*range(1, 19)] and rows[18]["spikes"] >= 1
    lines = (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()
    assert sum('"kind": "train"' in line for line in lines) == 18
    log = (tmp_path / "a" / "log.txt").read_text()
    assert "NOT EQUAL" not in log


def test_before_the_first_checkpoint_and_after_too_many_returns_it_goes_on(
    workers, make_job, tmp_path, jumps
):
    how = (*HOW, *jumps, POLICY.format("rollback"))
    train_on(workers, make_job("a", *how, "train.save_every=0"))
    assert any("no checkpoint is there" in line for line in spike_lines(tmp_path / "a"))
    job = make_job("b", *how, "method.spike.window=8", "train.steps=7")
    always = replace(job.method, spike=replace(job.method.spike, ratio=0.1))  # no recipe may say so
    train_on(workers, replace(job, plan=replace(job.plan, method=always)))
    told = spike_lines(tmp_path / "b")
    assert sum("back to step 4" in line for line in told) == 2
    assert any("step 4 was tried before" in line for line in told)
    assert len(metrics(tmp_path / "b")) == 7


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (("method.spike={deviations = 0}",), "method.spike has neither deviations nor ratio"),
        (("method.spike={ratio = 0.5}",), "method.spike.ratio is 0.5, so a loss like those before"),
        (("method.spike.window=2",), "method.spike.window is 2; it must be at least 4"),
        (("method.spike.most=0",), "method.spike.most is 0; it must be at least 1"),
        (("method.spike=skip",), "method.spike is 'skip'; it must be a table: write method.spike."),
        (("method.spike.action=stop",), "method.spike.action is 'stop'; it must be"),
        (("method.optimizer.average=1",), "method.optimizer.average is 1"),
        (
            (
                "method.spike={}",
                'method.sync={kind = "asp", workers = 2}',
                "layout=single server1",
                "method.grad_clip=0",
            ),
            "under method.sync there is no such batch",
        ),
    ],
)
def test_what_is_no_policy_is_one_sentence(make_job, keys, said):
    with pytest.raises(UserError, match=said):
        make_job("a", *keys)
