"""T5 beside transformers: a plain loop and howdah on two layouts each.

As `test_families_beside_transformers.py`: transformers' own model, built by its own class, is
trained by torch's AdamW; howdah reads its folder and trains on the same sources and targets, which
end in padding. After three steps losses, norms and every weight must agree, in float64 to 1e-10.
"""

import pytest
import torch
import torch.nn.functional as F

from howdah.model.hub import read_hub
from howdah.parallel.apply import apply
from howdah.parallel.full_tensors import full_parameter
from howdah.parallel.mesh import connect_mesh
from howdah.plan.batch import MASKED, Batch
from howdah.plan.layout import parse_layout
from howdah.plan.method import Method, Optimizer
from howdah.plan.plan import make_plan
from howdah.shapes.weights import weights
from howdah.text.batches import Micro
from howdah.train.resume import read_folder
from howdah.train.step import StepContext, train_step

transformers = pytest.importorskip("transformers")

ROWS, LENGTH, STEPS, RATE, CLIP, VOCAB, START = 4, 12, 3, 1e-3, 0.7, 61, 0
SIZES = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "d_kv": 6,
    "d_ff": 40,
    "num_heads": 4,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "n_positions": 32,
    "dropout_rate": 0.0,
    "pad_token_id": START,
    "decoder_start_token_id": START,
}
MODELS = {
    "t5": SIZES,
    "flan": SIZES | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
}
LAYOUTS = {
    "t5": ("dp2 tp2 sp zero3 x1", "pp2 1f1b recompute=full x2"),
    "flan": ("dp2 pp2 zero1 1f1b x2", "tp2 sp x2"),
}
PRECISIONS = {"float32": 1e-5, "float64": 1e-10}


def batch_of(step):
    """Sources, where they are no padding, tokens of the decoder, and labels."""
    draw = torch.Generator().manual_seed(100 + step)
    source, target = torch.randint(2, VOCAB, (2, ROWS, LENGTH), generator=draw)
    read, written = torch.randint(3, LENGTH + 1, (2, ROWS, 1), generator=draw)
    seen = (torch.arange(LENGTH) < read).long()
    labels = torch.where(torch.arange(LENGTH) < written, target, MASKED)
    tokens = F.pad(labels[:, :-1], (1, 0), value=START)
    return torch.where(seen > 0, source, START), seen, tokens.clamp(min=START), labels


def their_model(kind, dtype):
    torch.manual_seed(0)
    made = transformers.T5Config(**MODELS[kind])
    model = transformers.T5ForConditionalGeneration._from_config(made).to(dtype)
    if kind == "flan":  # transformers 5 ties what it makes
        model.lm_head.weight = torch.nn.Parameter(torch.zeros_like(model.shared.weight))
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.05 * torch.randn_like(weight))
    return model


def by_a_plain_loop(model):
    """Losses and norms of the steps."""
    decayed, others = [], []
    for name, weight in model.named_parameters():
        plain = weight.ndim == 1 or "relative_attention_bias" in name
        (others if plain else decayed).append(weight)
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=1e-8)
    found = []
    for step in range(STEPS):
        source, seen, _, labels = batch_of(step)
        loss = model(source, attention_mask=seen, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        found.append((loss.item(), norm.item()))
    return found


def by_howdah(transport, folder, words, precision):
    """The same on this rank of a layout; and how far its weights are from the folder `after`."""
    shape, _ = read_hub(folder / "before")
    method = Method(precision, Optimizer(weight_decay=0.1), grad_clip=CLIP)
    layout = parse_layout(words)
    batch = Batch(global_batch=ROWS, micro_batch=ROWS // (layout.readers * layout.micros))
    plan = make_plan(shape, layout, batch, sequence=LENGTH, method=method)
    with connect_mesh(plan.layout, transport, torch.device("cpu")) as mesh:
        placed = apply(plan, mesh=mesh, fill=read_folder(folder / "before", shape))
        context = StepContext(placed, mesh, method, 0)
        results = []
        for step in range(STEPS):
            micros = micros_of(step, plan, mesh.index_of("dp"))
            results.append(train_step(context, micros, step=step, rate=RATE))
        placed.sync_weights()
        _, tensor = read_hub(folder / "after")
        apart = 0.0
        for weight in weights(shape):
            mine, theirs = full_parameter(placed, weight.name), tensor(weight.name)
            apart = max(apart, float((mine - theirs).abs().max() / theirs.abs().max()))
        return [(result.loss, result.norm) for result in results], apart


def micros_of(step, plan, replica):
    given = [x.chunk(plan.layout.readers)[replica] for x in batch_of(step)]
    micros = []
    for rows in zip(*(x.split(plan.micro_batch) for x in given), strict=True):
        source, seen, tokens, labels = (x.contiguous().numpy() for x in rows)
        at = torch.arange(LENGTH).repeat(len(tokens), 1)
        one = torch.zeros_like(at).int().numpy()
        more = {"source": source, "seen": seen}
        micros.append(Micro(tokens, labels, at.numpy(), one, at[:, 0].numpy(), more))
    return micros


@pytest.mark.parametrize(
    ("kind", "precision"),
    [
        ("t5", "float64"),
        pytest.param("flan", "float64", marks=pytest.mark.slow),
        *(pytest.param(kind, "float32", marks=pytest.mark.slow) for kind in MODELS),
    ],
)
def test_three_steps_are_those_of_a_plain_loop(workers, tmp_path, kind, precision, monkeypatch):
    transformers.utils.logging.disable_progress_bar()
    model = their_model(kind, dtype := getattr(torch, precision))
    model.save_pretrained(tmp_path / "before")
    with monkeypatch.context() as patch:  # their norms are in float32 always; not while files are
        patch.setattr(torch, "float32", dtype)
        expected = by_a_plain_loop(model)
    model.save_pretrained(tmp_path / "after")
    bound = PRECISIONS[precision]
    for words in LAYOUTS[kind]:
        ranks = parse_layout(words).world
        for found, apart in workers.run(by_howdah, tmp_path, words, precision, ranks=ranks):
            assert found == [
                (pytest.approx(loss, rel=bound), pytest.approx(norm, rel=bound))
                for loss, norm in expected
            ], words
            assert apart < 10 * bound, words
