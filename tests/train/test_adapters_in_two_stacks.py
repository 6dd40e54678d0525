"""Runs that train adapters beside a model with experts, and beside an encoder-decoder: they go on
on another layout, their exports are models, and PEFT's files begin another run.
"""

import pytest
import torch
from small_runs import losses, opened, train_on

from howdah.model.adapter import merged
from howdah.model.hub import read_hub
from howdah.train.adapted import export_adapter
from howdah.train.finished_run import open_run

SIZES = {
    "t5": (
        *('model.family="encoder-decoder"', "model.encoder_layers=2", 'model.positions="relative"'),
        *('model.norm="rmsnorm"', "model.norm_eps=1e-6", 'model.feedforward="geglu"'),
        "model.vocab=380",
    ),
    "experts": ("model.experts.count=4", "model.experts.top_k=2", "model.experts.ffn_size=64"),
}
LOW = ("method.adapter.rank=4", 'method.adapter.targets=["q", "o"]', "method.lr.peak=0.03")
NAMES = {"t5": "layers.1.cross.o", "experts": "layers.1.attention.o"}


@pytest.mark.slow
@pytest.mark.parametrize("form", SIZES)
def test_an_adapter_goes_on_and_is_exported(workers, make_job, tmp_path, form):
    base, how = tmp_path / "base" / "export", (*SIZES[form], "train.save_every=0")
    train_on(workers, make_job("base", *how, "train.export=true", "train.steps=1"))

    def adapted(name, steps, *more):
        return make_job(name, f"init_from={base}", *how, *LOW, f"train.steps={steps}", *more)

    train_on(workers, adapted("a", 2, "layout=dp2 zero3"))
    train_on(workers, adapted("a", 4, "layout=tp2 sp"))
    train_on(workers, adapted("b", 4))
    mine, theirs = losses(tmp_path / "a"), losses(tmp_path / "b")
    assert mine.keys() == theirs.keys()
    for step, loss in theirs.items():
        assert mine[step] == pytest.approx(loss, rel=1e-5)
    there = opened(tmp_path / "a", 4)
    assert all(".lora_" in name for name in there.names("weight"))
    open_run(tmp_path / "a", say=print).export(tmp_path / "merged")
    (_, whole), (_, before) = read_hub(tmp_path / "merged"), read_hub(base)
    name = NAMES[form]
    a, b = (there.tensor("weight", f"{name}.lora_{one}.weight") for one in "ab")
    assert torch.equal(whole(f"{name}.weight"), merged(before(f"{name}.weight"), a, b, 16 / 4))
    assert torch.equal(whole("norm.weight"), before("norm.weight"))
    export_adapter(there, tmp_path / "peft")
    train_on(workers, adapted("c", 1, f"init_adapter={tmp_path / 'peft'}", "method.lr.peak=1e-30"))
    again = opened(tmp_path / "c", 1)
    for found in there.names("weight"):
        assert torch.equal(again.tensor("weight", found), there.tensor("weight", found)), found
