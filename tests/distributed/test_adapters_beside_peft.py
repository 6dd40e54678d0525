"""Adapters beside PEFT: gradients of the same matrices, and files both ways.

A model of transformers has an adapter of PEFT with random A and B, and with DoRA random lengths of
rows. howdah reads the base and PEFT's
files, and computes gradients of the same rows on several layouts. Then it writes PEFT's files, and
`PeftModel.from_pretrained` must give the logits of the merged model. All in float64, for which
transformers' float32 computations are made to be float64.
"""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from plain_loop import LENGTH, ROWS

from howdah.checkpoint.peft import read_peft, write_peft
from howdah.model.adapter import merged
from howdah.model.hub import read_hub
from howdah.model.hub_names import names
from howdah.parallel.apply import apply
from howdah.parallel.full_tensors import full_gradient
from howdah.parallel.mesh import connect_mesh
from howdah.plan.batch import Batch
from howdah.plan.layout import parse_layout
from howdah.plan.method import Adapter, Method
from howdah.plan.plan import make_plan
from howdah.plan.trained import MAGNITUDE, is_adapter
from howdah.text.batches import Micro
from howdah.train.adapted import beside_base, by_pieces
from howdah.train.resume import read_folder
from howdah.train.step import StepContext, accumulate

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
VOCAB = 61
LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
}
OURS = Adapter(rank=3, alpha=6.0, targets=("q", "k", "o", "down"))
KINDS = pytest.mark.parametrize("ours", [OURS, replace(OURS, kind="dora")], ids=["lora", "dora"])
THEIRS = ["q_proj", "k_proj", "o_proj", "down_proj"]


@pytest.fixture
def widened(monkeypatch):
    """transformers computes norms, angles and softmax in float32; here that means float64."""
    for name in ("float", "float32"):
        monkeypatch.setattr(torch, name, torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def rows():
    draw = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, VOCAB, (ROWS, LENGTH + 1), generator=draw)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def their_model(folder, ours):
    torch.manual_seed(0)
    made = transformers.AutoConfig.for_model("llama", **LLAMA)
    auto = transformers.AutoModelForCausalLM
    model = auto.from_config(made, attn_implementation="eager").to(torch.float64)
    model.save_pretrained(folder / "base")
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=THEIRS, use_dora=ours.measures)
    model = peft.get_peft_model(model, config).to(torch.float64)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_magnitude" in name:
                weight.mul_(1 + 0.1 * torch.randn_like(weight))
            elif "lora_" in name:
                weight.copy_(0.1 * torch.randn_like(weight))
    model.save_pretrained(folder / "peft")
    return model


def plan_of(folder, words, ours):
    shape, _ = read_hub(folder / "base")
    layout = parse_layout(words)
    batch = Batch(global_batch=ROWS, micro_batch=ROWS // (layout.readers * layout.micros))
    method = Method("float64", adapter=ours)
    return make_plan(shape, layout, batch, sequence=LENGTH, method=method)


def gradients_of(transport, folder, words, ours):
    """For workers: the gradients of the adapter on a layout, by name."""
    plan = plan_of(folder, words, ours)
    base, targets = read_folder(folder / "base", plan.shape), [*plan.marks.adapted]
    low = read_peft(
        folder / "peft", shape=plan.shape, adapter=ours, targets=targets, base=lambda: 0
    )
    with connect_mesh(plan.layout, transport, torch.device("cpu")) as mesh:
        fill = beside_base(by_pieces(low), base, is_adapter)
        placed = apply(plan, mesh=mesh, fill=fill)
        tokens, labels = (x.chunk(plan.layout.readers)[mesh.index_of("dp")] for x in rows())
        at = torch.arange(LENGTH).expand(len(tokens), LENGTH)
        arrays = (x.contiguous().numpy() for x in (tokens, labels, at, torch.zeros_like(at).int()))
        micro = Micro(*arrays, torch.arange(len(tokens)).numpy(), {})
        context = StepContext(placed, mesh, plan.method, 0)
        accumulate(context, [micro], step=0, tokens=ROWS * LENGTH)
        trained = [weight.name for weight in plan.weights if weight.rate]
        return {name: full_gradient(placed, name).numpy() for name in trained}


@pytest.mark.slow
@KINDS
def test_gradients_are_those_of_peft(workers, tmp_path, widened, ours):
    model = their_model(tmp_path, ours)
    tokens, labels = rows()
    F.cross_entropy(model(tokens).logits.flatten(0, 1), labels.flatten()).backward()
    theirs = {
        name.replace(".default", "").replace("_vector.weight", "_vector"): weight.grad
        for name, weight in model.named_parameters()
        if weight.grad is not None
    }
    plan = plan_of(tmp_path, "single x1", ours)
    modules = {one.ours[0]: one.name.removesuffix(".weight") for one in names(plan.shape)}
    for words in ("single x1", "tp2 sp x1", "dp2 zero3 x1", "pp2 x1"):
        ranks = parse_layout(words).world
        (mine, *_) = workers.run(gradients_of, tmp_path, words, ours, ranks=ranks)
        assert len(mine) == len(theirs) == 2 * 4 * (2 + ours.measures)
        for name, gradient in mine.items():
            path, side = name.removesuffix(".weight").rsplit(".lora_", 1)
            end = "magnitude_vector" if side == "magnitude" else f"{side.upper()}.weight"
            expected = theirs[f"base_model.model.{modules[f'{path}.weight']}.lora_{end}"].numpy()
            assert abs(gradient - expected).max() <= 1e-10 * abs(expected).max(), (words, name)


@pytest.mark.slow
@KINDS
def test_peft_loads_what_is_written(tmp_path, widened, ours):
    """Its logits are those of the merged weights; and what it writes is read."""
    model = their_model(tmp_path, ours).eval()
    tokens, _ = rows()
    plan = plan_of(tmp_path, "single x1", ours)
    targets = [*plan.marks.adapted]
    low = read_peft(
        tmp_path / "peft", shape=plan.shape, adapter=ours, targets=targets, base=lambda: 0
    )
    base = str(tmp_path / "base"), 5
    to = tmp_path / "ours"
    write_peft(to, shape=plan.shape, adapter=ours, targets=targets, base=base, tensor=low)
    auto = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float64)
    loaded = peft.PeftModel.from_pretrained(auto, to).to(torch.float64).eval()
    with torch.no_grad():
        expected = model(tokens).logits
        assert torch.allclose(loaded(tokens).logits, expected, rtol=0, atol=1e-12)
        _, tensor = read_hub(tmp_path / "base")
        plain = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "base", dtype=torch.float64
        )
        where = {one.ours[0]: one.name for one in names(plan.shape)}
        for target in targets:
            path = target.removesuffix(".weight")
            a, b = (low(f"{path}.lora_{one}.weight") for one in "ab")
            m = low(f"{path}{MAGNITUDE}") if ours.measures else None
            plain.get_parameter(where[target]).copy_(merged(tensor(target), a, b, ours.scale, m))
        assert torch.allclose(plain(tokens).logits, expected, rtol=0, atol=1e-10)
