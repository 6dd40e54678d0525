"""The model that samples at the end of a run: the same bits as ever in float32, and on any layout
no more than its weights, where the run computes.
"""

import re
from unittest.mock import patch

import pytest
import torch
from small_runs import metrics
from working_card import install, there

from howdah.comm.spawn import Workers
from howdah.comm.transport import SingleRank
from howdah.generate.draw import Draw
from howdah.generate.predictor import OneDevice
from howdah.generate.texts import sample_text
from howdah.host.peak import Peak
from howdah.model.transformer import Transformer
from howdah.parallel.flat_params import fill_masters, flatten
from howdah.plan.flat_buffers import buffers
from howdah.shapes.weights import weights
from howdah.train import finish, loop
from howdah.train.adapted import fill_for_use
from howdah.train.finished_run import FinishedRun, open_run

PROMPT = "7 follows"
SHORT = ["train.steps=4", "train.save_every=0", f"train.prompt={PROMPT}"]


def as_before(run):
    """The model of a run as it was made until now: in flat units of float32 on the CPU."""
    with torch.device("meta"):
        model = Transformer(run.shape)
    units = flatten(
        model, buffers(weights(run.shape)), dtype=torch.float32, device=torch.device("cpu")
    )
    fill_masters(units, fill_for_use(run.checkpoint))
    return model


def sampled(run, seed):
    parts = sample_text(
        *(OneDevice(as_before(run)), run.tokenizer(), PROMPT),
        length=16,
        draw=Draw(temperature=0.5, top_p=0.95, seed=seed),
        end=run.end,
    )
    return PROMPT + "".join(parts)


def watched(transport, job):
    """For workers: trains; the model that sampled and whether it was loaded, on rank 0."""
    seen, load, text = [], FinishedRun.model, finish.sample_text

    def loads(run, *how):
        seen.append("loaded")
        return load(run, *how)

    def samples(model, *rest, **how):
        seen.append([(p.dtype, p.device.type, p.data_ptr()) for p in model.model.parameters()])
        return text(model, *rest, **how)

    with patch.object(FinishedRun, "model", loads), patch.object(finish, "sample_text", samples):
        loop.train(job, transport)
    return seen


def kinds(seen):
    """(dtype, type of device) of the weights, of which there is one."""
    ((dtype, device),) = {weight[:2] for weight in seen[-1]}
    return dtype, device


WHOLE = ["single x2", "dp2 x1", "dp2 zero1", "dp2 zero2", "recompute=full"]
CUT = ["dp2 zero3", "tp2", "pp2 1f1b x2"]


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("layout", WHOLE + CUT)
def test_the_text_is_what_it_was_and_weights_are_loaded_only_where_they_are_cut(
    workers, make_job, tmp_path, layout
):
    job = make_job("a", f"layout={layout}", *SHORT)
    seen = workers.run(watched, job, ranks=job.layout.world)[0]
    assert ("loaded" in seen) == (layout in CUT)
    assert kinds(seen) == (torch.float32, "cpu")
    told = (tmp_path / "a" / "log.txt").read_bytes().decode()
    assert f"\n{sampled(open_run(tmp_path / 'a', say=print), job.seed)}\n" in told


def test_own_and_loaded_weights_give_the_same_bits(make_job, tmp_path):
    held = []
    keep = patch.object(finish, "own_model", held.append)
    with keep:
        loop.train(make_job("a", *SHORT), SingleRank())
    run = open_run(tmp_path / "a", say=print)
    from howdah.train.whole_model import own_model

    models = [own_model(held[0]), run.model(), as_before(run)]
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        found = [model.logits(model(tokens, tokens)) for model in models]
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[2])
    own = {name: weight.data_ptr() for name, weight in models[0].named_parameters()}
    trained = dict(held[0].model.named_parameters())
    assert own == {name: trained[name].data_ptr() for name in own}, "nothing is copied"


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("layout", ["dp2 zero1", "tp2"])
def test_a_run_in_bf16_samples_in_bf16(workers, make_job, layout):
    """It was a whole model in float32, twice what the run's own weights take."""
    job = make_job("a", f"layout={layout}", *SHORT, "method.precision=bf16")
    assert kinds(workers.run(watched, job, ranks=2)[0]) == (torch.bfloat16, "cpu")


def test_where_it_does_not_fit_there_is_a_sentence_and_no_failure(make_job, tmp_path, capsys):
    refused = patch.object(finish, "own_model", lambda placed: None)
    with refused, patch("howdah.train.finished_run.left", lambda device: 1000):
        outcome = loop.train(make_job("a", *SHORT, "method.precision=bf16"), SingleRank())
    assert outcome.signal == 0
    (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("sample ")]
    assert re.match(
        r"sample      not made: the model of .* takes 0\.0 GB of memory in bfloat16, and 0\.0 GB "
        r"are left; end other programs, or use a larger machine; try again with howdah sample ",
        line,
    )


def test_a_card_without_room_is_named(make_job, tmp_path):
    from howdah.base.errors import UserError

    loop.train(make_job("a", *SHORT), SingleRank())
    run = open_run(tmp_path / "a", say=print)
    with (
        patch("howdah.train.finished_run.left", lambda device: 1000),
        pytest.raises(
            UserError, match=r"are left on cuda:1; end other programs, or use a larger card"
        ),
    ):
        run.model(torch.bfloat16, torch.device("cuda", 1))


# -- on another device ---------------------------------------------------------------


def on_a_card(transport, job):
    """For workers: trains on the card, and samples there."""
    device = install()
    with (
        patch.object(loop, "own_device", lambda kind, rank: device),
        patch.object(loop, "peak_flops", lambda *_, **__: Peak(1e9, "made up")),
        patch.object(loop, "device_lines", lambda *_: []),
    ):
        return watched(transport, job)


@pytest.mark.slow
@pytest.mark.skipif(not there, reason="this torch has no devices written in Python")
@pytest.mark.parametrize(
    "layout",
    ["single x1", *(pytest.param(cut, marks=pytest.mark.slow) for cut in ("dp2 zero1", "tp2"))],
)
def test_a_run_on_a_card_samples_on_the_card(make_job, tmp_path, layout):
    words = [f"layout={layout}", "train.steps=2", "train.prompt=7 follows", "train.save_every=0"]
    with Workers(1 if layout == "single x1" else 2) as processes:
        seen = processes.run(on_a_card, make_job("a", *words))[0]
        processes.run(watched, make_job("b", *words))
    assert kinds(seen)[1] == "card"
    card, cpu = (metrics(tmp_path / name) for name in "ab")
    for step in (1, 2):
        assert card[step]["loss"] == pytest.approx(cpu[step]["loss"], rel=1e-5)
