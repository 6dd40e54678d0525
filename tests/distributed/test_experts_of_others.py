"""Models with experts beside transformers: the same steps by a plain loop and by howdah on layouts.

transformers' own model, built by its own class with random weights, is trained by torch's AdamW on
whole batches. howdah reads the weights from its folder and trains on the same tokens, dropless and
without losses of routers. Losses and norms must agree to 1e-6 in float32. The loop uses nothing of
howdah's model, losses, clipping or optimizer.
"""

import pytest
import torch
import torch.nn.functional as F

from howdah.model.hub import read_hub
from howdah.parallel.apply import apply
from howdah.parallel.mesh import connect_mesh
from howdah.plan.batch import Batch
from howdah.plan.layout import parse_layout
from howdah.plan.method import Method, Optimizer
from howdah.plan.plan import make_plan
from howdah.shapes.weights import weights
from howdah.text.batches import Micro
from howdah.train.resume import read_folder
from howdah.train.step import StepContext, train_step

transformers = pytest.importorskip("transformers")

ROWS, LENGTH, STEPS, RATE, CLIP = 8, 12, 5, 1e-3, 0.7
SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
MODELS = {
    "mixtral": SIZES | {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": SIZES
    | {
        "moe_intermediate_size": 24,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "kv_lora_rank": 16,
        "q_lora_rank": 20,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "num_mtp_layers": 0,
    },
}


def batch_of(step):
    """Tokens [rows, length + 1] of a step; rows are one document each."""
    draw = torch.Generator().manual_seed(100 + step)
    return torch.randint(0, SIZES["vocab_size"], (ROWS, LENGTH + 1), generator=draw)


def their_model(kind):
    torch.manual_seed(0)
    made = transformers.AutoConfig.for_model(kind, **MODELS[kind])
    return transformers.AutoModelForCausalLM.from_config(made, attn_implementation="eager")


def by_a_plain_loop(model):
    """Losses and norms of the steps."""
    matrices = [weight for weight in model.parameters() if weight.ndim > 1]
    others = [weight for weight in model.parameters() if weight.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=1e-8)
    found = []
    for step in range(STEPS):
        tokens = batch_of(step)
        logits = model(tokens[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        found.append((loss.item(), norm.item()))
    return found


def by_howdah(transport, folder, words):
    """The same on this rank of a layout."""
    shape, _ = read_hub(folder)
    method = Method(optimizer=Optimizer(weight_decay=0.1), grad_clip=CLIP)
    batch = Batch(global_batch=ROWS, micro_batch=2)
    plan = make_plan(shape, parse_layout(words), batch, sequence=LENGTH, method=method)
    with connect_mesh(plan.layout, transport, torch.device("cpu")) as mesh:
        placed = apply(plan, mesh=mesh, fill=read_folder(folder, shape))
        context = StepContext(placed, mesh, method, 0)
        results = []
        for step in range(STEPS):
            mine = batch_of(step).chunk(plan.layout.readers)[mesh.index_of("dp")]
            micros = [micro_of(rows) for rows in mine.split(2)]
            results.append(train_step(context, micros, step=step, rate=RATE))
        assert len(placed.plan.weights) == len(weights(shape))
        return [(result.loss, result.norm) for result in results]


def micro_of(rows):
    positions = torch.arange(LENGTH).expand(len(rows), LENGTH).contiguous()
    tokens, labels = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
    arrays = (x.numpy() for x in (tokens, labels, positions, torch.zeros_like(positions)))
    return Micro(*arrays, samples=torch.arange(len(rows)).numpy())


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kind", MODELS)
def test_losses_and_norms_are_those_of_a_plain_loop(workers, tmp_path, kind):
    transformers.utils.logging.disable_progress_bar()
    model = their_model(kind)
    model.save_pretrained(tmp_path)
    expected = by_a_plain_loop(model)
    for words in ("dp2 ep2 zero2 x2", "dp2 tp2 sp zero3 x2", "pp2 1f1b x4", "cp2 ep2 x4"):
        ranks = parse_layout(words).world
        for found in workers.run(by_howdah, tmp_path, words, ranks=ranks):
            assert found == [
                (pytest.approx(loss, rel=1e-6), pytest.approx(norm, rel=1e-6))
                for loss, norm in expected
            ], words
