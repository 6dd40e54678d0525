"""Runs that train adapters: their checkpoints, going on, other bases, exports, PEFT's files."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_runs import losses, opened, train_on

from howdah.base.errors import UserError
from howdah.checkpoint.peft import _config
from howdah.cli.check import sound
from howdah.comm.transport import SingleRank
from howdah.model.adapter import merged
from howdah.model.hub import read_hub
from howdah.plan.trained import MAGNITUDE
from howdah.train.adapted import export_adapter, tensors_for_use
from howdah.train.finished_run import open_run
from howdah.train.loop import train
from howdah.train.start import prepare_start, prepare_tokens, require_inputs

TARGETS = 'method.adapter.targets=["q", "o", "down"]'
LOW = ("method.adapter.rank=4", TARGETS, "train.save_every=0", "method.lr.peak=0.03")


@pytest.fixture
def base(workers, make_job, tmp_path):
    """A Hugging Face folder of a trained model."""
    train_on(workers, make_job("base", "train.export=true", "train.steps=1"))
    return tmp_path / "base" / "export"


@pytest.fixture
def adapted(workers, make_job, base):
    """Makes the job of a run with an adapter beside the base, on a layout."""

    def make(name, steps, *more):
        return make_job(name, f"init_from={base}", f"train.steps={steps}", *LOW, *more)

    return make


def started(job):
    require_inputs(job)
    prepare_start(job, prepare_tokens(job, print))


@pytest.mark.parametrize("kind", ["lora", pytest.param("dora", marks=pytest.mark.slow)])
def test_an_adapter_goes_on_on_another_layout(workers, adapted, tmp_path, base, kind):
    """Its checkpoint holds it, and not the base; its export is a model of the base's sizes."""
    of = f"method.adapter.kind={kind}"
    train_on(workers, adapted("a", 2, "layout=dp2 zero3", of))
    job = adapted("a", 4, "layout=tp2 sp", of)
    started(job)
    train_on(workers, job)
    train_on(workers, adapted("b", 4, of))
    mine, theirs = losses(tmp_path / "a"), losses(tmp_path / "b")
    assert mine.keys() == theirs.keys()
    for step, loss in theirs.items():
        assert mine[step] == pytest.approx(loss, rel=1e-5)
    there = opened(tmp_path / "a", 4)
    count = 2 * 3 * (3 if kind == "dora" else 2)
    assert len(there.names("weight")) == count == len(there.names("exp_avg"))
    assert all(".lora_" in name for name in there.names("weight"))
    open_run(tmp_path / "a", say=print).export(tmp_path / "merged")
    _, whole = read_hub(tmp_path / "merged")
    _, before = read_hub(base)
    name = "layers.1.attention.o"
    a, b = (there.tensor("weight", f"{name}.lora_{one}.weight") for one in "ab")
    m = there.tensor("weight", f"{name}{MAGNITUDE}") if kind == "dora" else None
    expected = merged(before(f"{name}.weight"), a, b, 16 / 4, m)
    assert torch.equal(whole(f"{name}.weight"), expected)
    assert not torch.equal(expected, before(f"{name}.weight"))
    assert torch.equal(whole("norm.weight"), before("norm.weight"))


def test_peft_files_come_back(workers, adapted, tmp_path):
    train_on(workers, adapted("a", 2))
    there = opened(tmp_path / "a", 2)
    export_adapter(there, tmp_path / "peft")
    stored = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
    assert torch.equal(stored[name], there.tensor("weight", "layers.0.attention.q.lora_b.weight"))
    job = adapted("b", 1, f"init_adapter={tmp_path / 'peft'}", "method.lr.peak=1e-9")
    started(job)
    train_on(workers, job)
    again = opened(tmp_path / "b", 1)
    for one in there.names("weight"):
        assert torch.allclose(again.tensor("weight", one), there.tensor("weight", one), atol=1e-7)


def test_lengths_of_rows_begin_as_those_of_the_base_and_come_back(workers, adapted, base, tmp_path):
    """DoRA: its first loss is that of LoRA, and PEFT's files have the lengths."""
    dora = "method.adapter.kind=dora"
    train_on(workers, adapted("a", 1, dora, "method.lr.peak=1e-9"))
    train_on(workers, adapted("b", 1))
    assert losses(tmp_path / "a")[1] == pytest.approx(losses(tmp_path / "b")[1], rel=1e-6)
    there = opened(tmp_path / "a", 1)
    _, before = read_hub(base)
    name = "layers.0.attention.o"
    lengths = there.tensor("weight", f"{name}{MAGNITUDE}")
    assert torch.allclose(lengths, before(f"{name}.weight").norm(dim=1), rtol=1e-6)
    peft = tmp_path / "peft"
    export_adapter(there, peft)
    stored = load_file(peft / "adapter_model.safetensors")
    theirs = "base_model.model.model.layers.0.self_attn.o_proj.lora_magnitude_vector"
    assert torch.equal(stored[theirs], lengths) and len(stored) == 2 * 3 * 3
    with pytest.raises(UserError, match=r"has use_dora True, and method\.adapter\.kind is lora"):
        started(adapted("c", 1, f"init_adapter={peft}"))
    stored[theirs] *= 3
    save_file(stored, peft / "adapter_model.safetensors", {"format": "pt"})
    job = adapted("c", 1, f"init_adapter={peft}", dora, "method.lr.peak=1e-9", "layout=dp2 zero3")
    started(job)
    train_on(workers, job)
    again = opened(tmp_path / "c", 1)
    for one in there.names("weight"):
        times = 3 if one == f"{name}{MAGNITUDE}" else 1
        assert torch.allclose(again.tensor("weight", one), times * there.tensor("weight", one))
    with pytest.raises(UserError, match=r"holds an adapter with kind dora, rank 4, alpha 16 and"):
        started(adapted("a", 2))
    stored[theirs] = stored[theirs][:3]
    save_file(stored, peft / "adapter_model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"lora_magnitude_vector in .* is \[3\], and one of \["):
        started(adapted("d", 1, f"init_adapter={peft}", dora))


def test_mistakes_about_an_adapter_are_named(workers, adapted, make_job, base, tmp_path):
    train_on(workers, adapted("a", 1))
    peft = tmp_path / "peft"
    export_adapter(opened(tmp_path / "a", 1), peft)
    at = f"init_adapter={peft}"
    say = {
        "holds an adapter with rank 4, alpha 16 and targets q, o, down; restore method.adapter": [
            ("a", 2, "method.adapter.alpha=8")
        ],
        "method.adapter.rank is 2": [("c", 1, at, "method.adapter.rank=2")],
        "which method.adapter.targets": [("c", 1, at, 'method.adapter.targets=["q"]')],
        "has no adapter_config.json; name a folder that PEFT": [("c", 1, f"init_adapter={base}")],
    }
    for sentence, cases in say.items():
        for name, steps, *more in cases:
            with pytest.raises(UserError, match=sentence.replace(".", r"\.")):
                started(adapted(name, steps, *more))
    with pytest.raises(
        UserError, match=r"trains beside the weights of a model, and this run would"
    ):
        started(make_job("d", *LOW))
    with pytest.raises(UserError, match=r"init_adapter is given, and method\.adapter is not"):
        make_job("d", f"init_from={base}", at)
    with pytest.raises(UserError, match=r"holds an adapter beside .* trains the model's own"):
        started(make_job("a", f"init_from={base}", "train.steps=2"))
    with pytest.raises(UserError, match=r"holds a whole model and no adapter"):
        export_adapter(opened(tmp_path / "base", 1), tmp_path / "other")
    config = json.loads((peft / "adapter_config.json").read_text())
    for other, sentence in (
        ({"use_dora": True}, r"has use_dora True, and method\.adapter\.kind is lora"),
        ({"init_lora_weights": "pissa"}, r"init_lora_weights 'pissa', which changes the base too"),
        ({"modules_to_save": ["head"]}, r"modules_to_save \['head'\], whole weights that are"),
        ({"alora_invocation_tokens": [1]}, r"has alora_invocation_tokens, which howdah has not"),
    ):
        (peft / "adapter_config.json").write_text(json.dumps(config | other))
        with pytest.raises(UserError, match=sentence):
            started(adapted("c", 1, at))


def test_settings_that_are_nested_too_deep_are_a_sentence(tmp_path):
    (tmp_path / "adapter_config.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match=r"cannot read .*: its lists or tables are nested too deep"):
        _config(tmp_path)


def test_check_looks_at_an_adapter(recipe, base, tmp_path):
    """It told that a recipe was sound which `train` refused."""
    with pytest.raises(
        UserError, match=r"trains beside the weights of a model, and this run would"
    ):
        sound(recipe, LOW, force=True)
    words = [*LOW, f"init_from={base}", f"folder={tmp_path / 'new'}"]
    assert ": sound: " in "".join(sound(recipe, words, force=True))
    with pytest.raises(UserError, match=r"has no adapter_config\.json; name a folder that PEFT"):
        sound(recipe, [*words, f"init_adapter={base}"], force=True)


def test_an_adapter_of_a_model_of_another_size_is_refused(workers, adapted, tmp_path):
    """PEFT's own files have no checksum of their base, and the sizes are all there is."""
    train_on(workers, adapted("a", 1))
    peft = tmp_path / "peft"
    export_adapter(opened(tmp_path / "a", 1), peft)
    path, name = peft / "adapter_model.safetensors", "base_model.model.model.layers.0.mlp.down_proj"
    found = load_file(path)
    job = adapted("b", 1, f"init_adapter={peft}")
    for side, size in (("A", (4, 99)), ("B", (99, 4))):
        save_file({**found, f"{name}.lora_{side}.weight": torch.zeros(size)}, path)
        with pytest.raises(UserError, match=rf"lora_{side}\.weight in .* is \[{size[0]}, .* fits"):
            started(job)
    save_file({**found, f"{name}.lora_A.weight": found[f"{name}.lora_A.weight"] / 0}, path)
    with pytest.raises(UserError, match=r"lora_A\.weight in .* is not finite; name another folder"):
        started(job)


def test_another_base_is_refused_by_its_checksum(workers, adapted, base, tmp_path):
    """One number of one matrix is enough, and a base that was moved is the same."""
    train_on(workers, adapted("a", 1))
    export_adapter(opened(tmp_path / "a", 1), tmp_path / "peft")
    moved = tmp_path / "moved"
    shutil.copytree(base, moved)
    started(adapted("a", 2, f"init_from={moved}"))
    weights = load_file(moved / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 4] += 1e-3
    save_file(weights, moved / "model.safetensors", {"format": "pt"})
    other = tmp_path / "other"
    moved.rename(other)  # a process remembers the checksum of a folder
    with pytest.raises(UserError, match=r"trained beside other weights than those in .*other now"):
        started(adapted("a", 2, f"init_from={other}"))
    with pytest.raises(UserError, match=r"was trained beside another base than init_from names"):
        started(adapted("b", 1, f"init_from={other}", f"init_adapter={tmp_path / 'peft'}"))
    shutil.rmtree(base)
    with pytest.raises(UserError, match=r"beside, does not exist; make it a link to where they"):
        tensors_for_use(opened(tmp_path / "a", 1))


def test_a_part_of_a_model_goes_on_on_another_layout(workers, make_job, tmp_path):
    """And its checkpoint holds all weights; to train more than before is refused."""
    part = ('method.train=["layers.1.*", "norm.weight=0.1"]', "train.save_every=0")
    train_on(workers, make_job("a", "layout=dp2 zero3", "train.steps=2", *part))
    train_on(workers, make_job("a", "layout=pp2", "train.steps=4", *part))
    train_on(workers, make_job("b", "train.steps=4", *part))
    mine, theirs = losses(tmp_path / "a"), losses(tmp_path / "b")
    for step, loss in theirs.items():
        assert mine[step] == pytest.approx(loss, rel=1e-5)
    first, last = opened(tmp_path / "a", 2), opened(tmp_path / "a", 4)
    frozen = "layers.0.attention.q.weight"
    assert torch.equal(first.tensor("weight", frozen), last.tensor("weight", frozen))
    trained = "layers.1.attention.q.weight"
    assert not torch.equal(first.tensor("weight", trained), last.tensor("weight", trained))
    assert frozen not in last.names("exp_avg") and trained in last.names("exp_avg")
    job = make_job("a", "train.steps=5", 'method.train=["layers.*"]')
    with pytest.raises(UserError, match=r"was trained with layers\.0\.attention_norm\.weight froz"):
        started(job)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's compiler looks at tensors in ways that warn
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_compiled_blocks_with_adapters_compute_the_same(workers, adapted, tmp_path, kind):
    for name, compiles in (("a", "false"), ("b", "true")):
        settings = f"compile={compiles}", f"method.adapter.kind={kind}"
        train(adapted(name, 3, *settings), SingleRank())
    mine, theirs = losses(tmp_path / "a"), losses(tmp_path / "b")
    for step, loss in theirs.items():
        assert mine[step] == pytest.approx(loss, rel=1e-5)
