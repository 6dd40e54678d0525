"""Sequences shared by ranks, beside a Llama of transformers that a plain loop trains.

The loop knows nothing of howdah: their model and loss, torch's AdamW and clipping, one process. The
same weights, as files, and the same tokens are given to howdah on layouts with cp.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from howdah.base.errors import UserError
from howdah.model.hub import read_hub
from howdah.parallel.apply import apply
from howdah.parallel.mesh import connect_mesh
from howdah.plan.batch import Batch
from howdah.plan.layout import parse_layout
from howdah.plan.method import Method
from howdah.plan.plan import make_plan
from howdah.shapes.shape import RopeScaling
from howdah.text.batches import Micro
from howdah.train.resume import read_folder
from howdah.train.step import StepContext, train_step

transformers = pytest.importorskip("transformers")

ROWS, LENGTH, STEPS, RATE = 2, 37, 4, 3e-3  # chunks of cp2 and cp4 differ by a token


def tokens_of(step):
    """[b, s + 1] tokens of a step."""
    draw = np.random.default_rng(step)
    return draw.integers(0, 61, (ROWS, LENGTH + 1))


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """A folder with their model, and losses and norms of the plain loop."""
    folder = tmp_path_factory.mktemp("llama")
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 44, "vocab_size": 61}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**sizes, **heads, tie_word_embeddings=False)
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder)
    small = [p for p in model.parameters() if p.ndim == 1]
    large = [p for p in model.parameters() if p.ndim > 1]
    groups = [{"params": large, "weight_decay": 0.1}, {"params": small, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=1e-8)
    losses, norms = [], []
    for step in range(STEPS):
        tokens = torch.from_numpy(tokens_of(step))
        logits = model(tokens[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        losses.append(float(loss.detach()))
    return folder, losses, norms


def ours(transport, words, folder):
    """For workers: losses and norms of the same steps on a layout."""
    shape, tensor = read_hub(folder)

    def fill(piece, out):
        slices = zip(piece.box.corner, piece.box.size, strict=True)
        inside = tensor(piece.name)[tuple(slice(at, at + size) for at, size in slices)]
        out.copy_(inside.reshape(-1)[piece.start : piece.stop])

    method = Method("float32")
    plan = make_plan(shape, parse_layout(words), Batch(ROWS, ROWS), sequence=LENGTH, method=method)
    losses, norms = [], []
    with connect_mesh(plan.layout, transport, torch.device("cpu")) as mesh:
        context = StepContext(apply(plan, mesh=mesh, fill=fill), mesh, method, seed=0)
        for step in range(STEPS):
            tokens = tokens_of(step)
            places = np.tile(np.arange(LENGTH), (ROWS, 1))
            one = np.zeros((ROWS, LENGTH), np.int32)
            micro = Micro(tokens[:, :-1].copy(), tokens[:, 1:].copy(), places, one, np.arange(ROWS))
            result = train_step(context, [micro], step=step, rate=RATE)
            losses.append(result.loss)
            norms.append(result.norm)
    return losses, norms


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "words",
    [
        "cp2",
        "cp2 tp2",
        pytest.param("cp4", marks=pytest.mark.slow),
        pytest.param("cp2 context=all-to-all", marks=pytest.mark.slow),
        pytest.param("cp2 tp2 sp context=all-to-all", marks=pytest.mark.slow),
    ],
)
def test_losses_and_norms_are_those_of_a_plain_loop(workers, theirs, words):
    folder, losses, norms = theirs
    for mine in workers.run(ours, words, folder, ranks=parse_layout(words).world):
        assert mine[0] == pytest.approx(losses, rel=1e-6)
        assert mine[1] == pytest.approx(norms, rel=1e-6)


def test_a_folder_s_model_may_be_trained_at_a_longer_context(theirs):
    folder, *_ = theirs
    shape, scaling = read_hub(folder)[0], RopeScaling(4.0, context=64, kind="yarn")
    assert read_folder(folder, replace(shape, context=256, rope_scaling=scaling))
    with pytest.raises(UserError, match=r"differs from this run's in rope_scaling"):
        read_folder(folder, replace(shape, rope_scaling=scaling))
