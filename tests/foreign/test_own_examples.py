"""The examples of foreign models: a U-Net, and torchvision's resnet18 where that is installed."""

import importlib.util
import subprocess
import sys

import pytest
import torch
from run_examples import ROOT, load

import howdah
from howdah.comm.transport import SingleRank

UNET, RESNET = "examples/unet.py", "examples/resnet18.py"


def trained(transport, path, layout):
    if path == RESNET:
        load("bench/own_model/vision.py").KEPT = load("bench/own_model/vision.py").prepare()
    return load(path).main(*layout.split(), transport=transport)


@pytest.mark.parametrize("layout", ["dp2 zero3 recompute=full", "dp2 zero1 x2"])
def test_a_unet_has_the_losses_of_one_process(workers, layout):
    alone = trained(SingleRank(), UNET, "single")
    assert alone[-1] < 0.6 * alone[0]
    for losses in workers.run(trained, UNET, layout, ranks=2):
        assert losses == pytest.approx(alone, rel=1e-4)


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None,
    reason="torchvision is not installed (bench/own_model/vision.py says how)",
)
def test_resnet18_has_the_losses_of_one_process_on_the_same_groups_of_rows(workers):
    """To 1e-3, for batch norms magnify the rounding of sums in another order."""
    alone = trained(SingleRank(), RESNET, "single x2")
    for layout in ("dp2", "dp2 zero1", "dp2 zero2", "dp2 zero3"):
        for losses in workers.run(trained, RESNET, layout, ranks=2):
            assert losses == pytest.approx(alone, rel=1e-3), layout


@pytest.mark.slow
def test_torchrun_starts_the_unet():
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    words = ["dp*", "zero3", "x2", "recompute=full"]
    ended = subprocess.run(
        [*torchrun, UNET, *words], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == ["dp2 zero3 x2 recompute=full: 0.7065 to 0.3537"]


def of_transformers(transport, layout):
    """For workers: losses of a GPT-2 whose head is its embedding, the verdict and the units."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_layer": 3, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 16}
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    net = GPT2LMHeadModel(GPT2Config(**sizes, **off)).double()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    job = howdah.distribute(net, optimizer, layout, transport=transport)
    batch = {"input_ids": torch.randint(0, 64, (6, 16))}

    def loss_of(rows):
        return net(**rows, labels=rows["input_ids"]).loss

    losses = [job.step(loss_of, batch) for _ in range(3)]
    verdict, state = howdah.verify_step(job, loss_of, batch), job.state()
    units = list(job.plan().units)
    job.close()
    assert list(state) == list(GPT2LMHeadModel(net.config).state_dict())
    return losses, verdict, units


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp2 zero1", "dp2 zero3 x2 recompute=full"])
def test_a_model_of_transformers_has_the_losses_of_one_process(workers, layout):
    alone, *_ = of_transformers(SingleRank(), "single")
    for losses, verdict, units in workers.run(of_transformers, layout, ranks=2):
        assert losses == pytest.approx(alone, rel=1e-6)  # its loss is a mean in float32
        assert verdict.equal, str(verdict)
        blocks = [f"transformer.h.{n}" for n in range(3)]
        assert units == ["the rest", "transformer.wpe", *blocks, "transformer.ln_f"]
