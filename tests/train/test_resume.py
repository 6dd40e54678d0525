"""Going on with a run: where it begins, that nothing of the past is lost, and who is refused.

A run that died is a run folder whose newer checkpoints are gone: it goes on from the one before.
"""

import json
import re
import shutil
from dataclasses import replace
from itertools import product
from zlib import crc32

import pytest
import torch
from small_runs import (
    assert_same_bits,
    copy_until,
    forget,
    losses,
    opened,
    tensors,
    train_on,
)

from howdah.base.errors import UserError
from howdah.checkpoint.folders import step_folder, steps
from howdah.train.finished_run import open_run
from howdah.train.resume import as_plain, choose
from howdah.train.start import prepare_start, prepare_tokens, require_inputs

# A batch that is small at first, with sizes that no number of ranks divides.
RAMP = ["batch.global_batch=6", "batch.micro_batch=2", "batch.ramp_from=1", "batch.ramp_steps=15"]


def going_on_changes_nothing(workers, job):
    """Trains 20 steps, then the last 10 again from the checkpoint of step 10."""
    train_on(workers, job)
    whole, whole_losses = tensors(job.folder, 20), losses(job.folder)
    forget(job.folder, 20)
    train_on(workers, job)
    assert_same_bits(whole, tensors(job.folder, 20))
    assert losses(job.folder) == whole_losses


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("precision", "layout"),
    [
        *(("float32", "single"), ("bf16", "dp2 zero2")),
        *(
            pytest.param(*both, marks=pytest.mark.slow)
            for both in product(("float32", "bf16"), ("single", "dp2", "dp2 zero2"))
            if both not in {("float32", "single"), ("bf16", "dp2 zero2")}
        ),
    ],
)
def test_going_on_is_equal_bit_for_bit(workers, make_job, layout, precision):
    job = make_job("a", f"layout={layout}", f"method.precision={precision}", "method.dropout=0.1")
    going_on_changes_nothing(workers, job)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("optimizer", "states"),
    [
        (["name=adam"], ["exp_avg", "exp_avg_sq"]),
        (["name=sgd"], ["momentum_buffer"]),
        (["name=sgd", "momentum=0"], []),
        (["name=rmsprop"], ["square_avg", "momentum_buffer"]),
        (["name=rmsprop", "momentum=0"], ["square_avg"]),
    ],
    ids=" ".join,
)
def test_every_optimizer_goes_on(workers, make_job, tmp_path, optimizer, states):
    settings = [f"method.optimizer.{setting}" for setting in optimizer]
    job = make_job("a", *settings, "method.lr.peak=1e-2", "method.grad_clip=0.5")
    going_on_changes_nothing(workers, job)
    assert set(opened(tmp_path / "a", 20).kinds) == {"weight", *states}
    assert losses(tmp_path / "a")[20] < losses(tmp_path / "a")[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "batch", [pytest.param([], marks=pytest.mark.slow, id="even"), pytest.param(RAMP, id="ramp")]
)
def test_going_on_with_other_ranks_reads_the_same_samples(workers, make_job, tmp_path, batch):
    train_on(workers, make_job("a", "layout=dp2", *batch))
    never_changed, sample = losses(tmp_path / "a"), opened(tmp_path / "a", 20).samples
    for layout in ("single", "dp3", "dp4", "dp3 zero1", "dp4 zero2"):
        folder = copy_until(tmp_path / "a", tmp_path / layout, 10)
        train_on(workers, make_job(layout, f"layout={layout}", *batch))
        assert opened(folder, 20).samples == sample
        assert losses(folder) == pytest.approx(never_changed, rel=1e-6)


def test_a_run_on_shares_goes_on_without_them(workers, make_job, tmp_path):
    train_on(workers, make_job("a", "layout=dp3 zero2"))
    never_changed = losses(tmp_path / "a")
    for layout in ("single", "dp2 zero1", "dp4"):
        folder = copy_until(tmp_path / "a", tmp_path / layout, 10)
        train_on(workers, make_job(layout, f"layout={layout}"))
        assert losses(folder) == pytest.approx(never_changed, rel=1e-6)


def test_going_on_with_other_accumulation_changes_nothing(workers, make_job, tmp_path):
    train_on(workers, make_job("a", "layout=single x1"))
    copy_until(tmp_path / "a", tmp_path / "b", 10)
    train_on(workers, make_job("b", "layout=single x3"))
    assert losses(tmp_path / "b") == pytest.approx(losses(tmp_path / "a"), rel=1e-6)
    copy_until(tmp_path / "b", tmp_path / "c", 10)
    forgotten = make_job("c", "layout=single x1")
    train_on(workers, forgotten)
    assert losses(tmp_path / "c") == pytest.approx(losses(tmp_path / "a"), rel=1e-6)


def test_a_finished_run_is_left_as_it_is(workers, make_job, tmp_path):
    job = make_job("a", "train.steps=4")
    train_on(workers, job)
    before = tensors(tmp_path / "a", 4)
    (outcome,) = train_on(workers, job)
    assert outcome.step == 4
    assert_same_bits(before, tensors(tmp_path / "a", 4))


def test_a_longer_run_goes_on_from_its_end(workers, make_job, tmp_path):
    train_on(workers, make_job("a", "train.steps=4"))
    train_on(workers, make_job("a", "train.steps=6", "batch.global_batch=8"))
    assert list(losses(tmp_path / "a")) == [1, 2, 3, 4, 5, 6]
    assert opened(tmp_path / "a", 6).samples == 4 * 6 + 2 * 8


# -- damage ----------------------------------------------------------------------


def damage(folder, step, how):
    path = step_folder(folder / "checkpoints", step) / "rank-00000.safetensors"
    content = bytearray(path.read_bytes())
    if how == "truncated":
        del content[-100:]
    else:
        content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("how", ["truncated", "one bit flipped"])
def test_a_damaged_checkpoint_is_passed_over_and_told(workers, make_job, tmp_path, how):
    job = make_job("a")
    train_on(workers, job)
    whole = tensors(tmp_path / "a", 20)
    damage(tmp_path / "a", 20, how)
    told = []
    assert choose(tmp_path / "a" / "checkpoints", told.append).step == 10
    assert len(told) == 1 and "step-00000020 is passed over: " in told[0]
    train_on(workers, job)
    assert_same_bits(whole, tensors(tmp_path / "a", 20))


def test_when_all_are_damaged_nothing_begins_anew(workers, make_job, tmp_path):
    job = make_job("a")
    train_on(workers, job)
    for step in (10, 20):
        damage(tmp_path / "a", step, "truncated")
    with pytest.raises(UserError, match=r"every checkpoint in .* is damaged; restore one"):
        prepare_start(job, prepare_tokens(job, print))
    assert steps(tmp_path / "a" / "checkpoints") == [10, 20]


def test_where_nothing_was_saved_there_is_nothing_to_choose(tmp_path):
    assert choose(tmp_path / "checkpoints", print) is None


# -- another training --------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(workers, text, cache, tmp_path_factory):
    """A run folder with a checkpoint of adamw and one of sgd without momentum."""
    from small_runs import RECIPE

    from howdah.config.recipe import Machine, load_run, resolve_run

    folder = tmp_path_factory.mktemp("trained")
    (folder / "small.toml").write_text(RECIPE.format(text=text))
    machine = Machine(world=None, local_world=None, cores=1, cuda=0, cache=cache)
    for name, settings in {"adamw": [], "sgd": ["name=sgd", "momentum=0"]}.items():
        overrides = [f"method.optimizer.{setting}" for setting in settings]
        place = [f"folder={folder / name}", "train.steps=1"]
        run = load_run(folder / "small.toml", [*place, *overrides])
        train_on(workers, resolve_run(run, machine))
    return folder


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("model.layers=3", "holds a model with layers 2, this run has 3; "),
        (
            "model.tie_embeddings=true",
            "holds a model with tie_embeddings False, this run has True; ",
        ),
        ("model.rope_scaling={factor=2}", "holds a model with rope_scaling None, this "),
        ("model.vocab=301", "holds a model with vocab 300, this run has 301; "),
        ("data.validation_share=0.5", "was trained with another tokenizer: its text"),
        ("seed=2", "was trained with seed 1, this run has 2, so the next sample"),
        (
            "data.sequence_length=16",
            "was trained with data.sequence_length 32, this run has 16, so",
        ),
        ("method.optimizer.name=rmsprop", "holds the state of adamw, this run uses rmsprop; "),
    ],
)
def test_another_training_is_refused_before_it_starts(
    make_job, trained, tmp_path, change, sentence
):
    shutil.copytree(trained / "adamw", tmp_path / "a")
    job = make_job("a", change)
    with pytest.raises(UserError, match=f"step-00000001 {re.escape(sentence)}") as refused:
        prepare_start(job, prepare_tokens(job, print))
    assert "\n" not in str(refused.value)


def test_a_remedy_is_said_once_and_what_follows_is_not(make_job, trained, tmp_path):
    shutil.copytree(trained / "adamw", tmp_path / "a")
    job = make_job("a", "model.layers=3", "model.width=64", "seed=2")
    with pytest.raises(UserError) as refused:
        prepare_start(job, prepare_tokens(job, print))
    assert "width" in str(refused.value) and "head_size" not in str(refused.value)
    assert str(refused.value).count("restore it") == 1


def reseal(checkpoint, meta):
    """Writes the index of a checkpoint with other facts, and the checksum that belongs to it."""
    fields = json.loads((checkpoint / "index.json").read_text())
    fields.pop("crc32")
    fields["meta"] |= meta
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    (checkpoint / "index.json").write_text(json.dumps({**fields, "crc32": crc32(text.encode())}))


@pytest.mark.parametrize(
    "meta", [{"model": []}, {"order": {"seed": "1"}}, {"optimizer": ["adamw"]}, {"end": 1e9}]
)
def test_facts_that_make_no_sense_are_a_sentence(make_job, trained, tmp_path, meta):
    """They raised TypeError and KeyError, after everything else had been found sound."""
    shutil.copytree(trained / "adamw", tmp_path / "a")
    reseal(step_folder(tmp_path / "a" / "checkpoints", 1), meta)
    job = make_job("a")
    with pytest.raises(UserError, match="does not say what it was trained with: "):
        prepare_start(job, prepare_tokens(job, print))
    with pytest.raises(UserError, match="does not say what it was trained with: "):
        open_run(tmp_path / "a", say=print).model()


def test_other_text_under_the_same_tokenizer_is_refused(make_job, trained, text, tmp_path):
    """The tokenizer was brought along, so that only the samples tell the texts apart."""
    shutil.copytree(trained / "adamw", tmp_path / "a")
    shutil.copytree(text, tmp_path / "other")
    (tmp_path / "other" / "9.txt").write_text("and then there was more " * 200)
    tokenizer = f"data.tokenizer={tmp_path / 'a' / 'tokenizer.json'}"
    same = make_job("a", tokenizer)
    prepare_start(same, prepare_tokens(same, print))
    job = make_job("a", tokenizer, f"data.sources=['{tmp_path / 'other'}']")
    sentence = (
        r"was trained with samples of each source \[\d+\], this run has .*; restore them, or go on "
        rf"with this text in another run: howdah export {tmp_path}/a --to DIR, then init_from=DIR f"
    )
    with pytest.raises(UserError, match=sentence):
        prepare_start(job, prepare_tokens(job, print))


def test_momentum_cannot_begin_in_the_middle(make_job, trained, tmp_path):
    shutil.copytree(trained / "sgd", tmp_path / "a")
    job = make_job("a", "method.optimizer.name=sgd", "method.optimizer.momentum=0.9")
    with pytest.raises(UserError, match=r"holds no momentum_buffer of sgd, which .* 0\.9 needs; "):
        prepare_start(job, prepare_tokens(job, print))


@pytest.mark.parametrize(
    "change",
    ["method.lr.peak=1e-4", "batch.global_batch=9", "layout=dp2", "method.precision=bf16"],
)
def test_what_keeps_the_training_may_change(make_job, trained, tmp_path, change):
    shutil.copytree(trained / "adamw", tmp_path / "a")
    job = make_job("a", change)
    prepare_start(job, prepare_tokens(job, print))


def test_going_on_in_another_precision_keeps_the_numbers(workers, make_job, trained, tmp_path):
    shutil.copytree(trained / "adamw", tmp_path / "a")
    still = ["method.lr.peak=1e-30", "method.optimizer.weight_decay=0", "train.steps=2"]
    train_on(workers, make_job("a", "method.precision=float64", *still))
    before, after = tensors(tmp_path / "a", 1), tensors(tmp_path / "a", 2)
    name = "weight", "layers.0.attention.q.weight"
    assert after[name].dtype == torch.float64
    torch.testing.assert_close(after[name], before[name].double(), rtol=0, atol=1e-25)


def test_a_folder_of_another_model_is_refused(workers, make_job, tmp_path):
    train_on(workers, make_job("a", "train.export=true", "train.steps=1"))
    job = make_job("b", f"init_from={tmp_path / 'a' / 'export'}", "model.layers=3")
    with pytest.raises(UserError, match=r"differs from this run's in layers; leave the \[model\]"):
        require_inputs(job)


def test_plain_facts_survive_json(make_job):
    plain = as_plain(make_job("a", "model.rope_scaling={factor=2}").shape)
    assert plain["rope_scaling"]["factor"] == 2 and plain["layers"] == 2


def test_a_size_that_is_said_out_loud_is_the_same_model(workers, make_job, tmp_path):
    """Hugging Face folders leave head_size to follow from the width; presets may state it."""
    train_on(workers, make_job("a", "train.steps=10"))
    said = make_job("a", "train.steps=12", "model.head_size=16", "model.kv_heads=2")
    (outcome,) = train_on(workers, said)
    assert outcome.step == 12
    read_folder_of = make_job("b", "model.head_size=16", "model.kv_heads=2", "train.steps=1")
    open_run(tmp_path / "a", say=print).export(tmp_path / "hub")
    (outcome,) = train_on(workers, replace(read_folder_of, init_from=tmp_path / "hub"))
    assert outcome.step == 1


def test_a_prompt_that_is_longer_than_the_context_is_refused_before_training(make_job):
    job = make_job("a", f"train.prompt={'words and ' * 200}")
    with pytest.raises(
        UserError, match=r"^train\.prompt has \d+ tokens, and the model's context is"
    ):
        prepare_tokens(job, print)
