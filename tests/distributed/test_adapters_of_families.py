"""Adapters beside PEFT, of models with experts, with latent attention, and with an encoder:
gradients on several layouts, and files both ways. In float64, as test_adapters_beside_peft.py.
"""

import pytest
import torch
import torch.nn.functional as F
from plain_loop import LENGTH, ROWS
from test_adapters_beside_peft import rows, widened  # noqa: F401  (a fixture)
from test_experts_of_others import MODELS
from test_t5_beside_transformers import batch_of, micros_of
from test_t5_beside_transformers import their_model as their_t5

from howdah.checkpoint.peft import read_peft, write_peft
from howdah.model.hub import read_hub
from howdah.model.hub_names import names
from howdah.parallel.apply import apply
from howdah.parallel.full_tensors import full_gradient
from howdah.parallel.mesh import connect_mesh
from howdah.plan.batch import MASKED, Batch
from howdah.plan.layout import parse_layout
from howdah.plan.method import Adapter, Method
from howdah.plan.plan import make_plan
from howdah.plan.trained import is_adapter
from howdah.text.batches import Micro
from howdah.train.adapted import beside_base, by_pieces
from howdah.train.resume import read_folder
from howdah.train.step import StepContext, accumulate

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),
]
LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
TARGETS = {  # ours, and PEFT's
    "mixtral": (("q", "k", "v", "o"), ("q_proj", "k_proj", "v_proj", "o_proj")),
    "deepseek_v3": (("q_down", "q_up", "kv_down", "kv_up", "o"), LATENT),
    "t5": (("q", "v", "o", "down"), ("q", "v", "o", "wo")),
}
CPU = torch.device("cpu")


def base_model(kind):
    if kind == "t5":
        return their_t5("t5", torch.float64)
    torch.manual_seed(0)
    made = transformers.AutoConfig.for_model(kind, **MODELS[kind])
    made._experts_implementation = "eager"  # the grouped product refuses float64
    auto = transformers.AutoModelForCausalLM
    return auto.from_config(made, attn_implementation="eager").to(torch.float64)


def adapted_model(folder, kind):
    """A model of transformers with an adapter of PEFT; the folder gets both."""
    model = base_model(kind)
    model.save_pretrained(folder / "base")
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=[*TARGETS[kind][1]])
    model = peft.get_peft_model(model, config).to(torch.float64)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.copy_(0.1 * torch.randn_like(weight))
    model.save_pretrained(folder / "peft")
    return model


def logits_of(model, kind):
    """Logits and labels, of the rows that both read."""
    if kind == "t5":
        source, seen, _, labels = batch_of(0)
        return model(input_ids=source, attention_mask=seen, labels=labels).logits, labels
    tokens, labels = rows()
    return model(tokens).logits, labels


def plan_of(folder, kind, words):
    shape, _ = read_hub(folder / "base")
    layout, ours = parse_layout(words), Adapter(rank=3, alpha=6.0, targets=TARGETS[kind][0])
    batch = Batch(global_batch=ROWS, micro_batch=ROWS // (layout.readers * layout.micros))
    method = Method("float64", adapter=ours)
    return make_plan(shape, layout, batch, sequence=LENGTH, method=method)


def low_of(folder, plan):
    targets, adapter = [*plan.marks.adapted], plan.method.adapter
    where = folder / "peft"
    return read_peft(where, shape=plan.shape, adapter=adapter, targets=targets, base=lambda: 0)


def micros(kind, plan, replica):
    if kind == "t5":
        return micros_of(0, plan, replica)
    tokens, labels = (x.chunk(plan.layout.readers)[replica] for x in rows())
    at = torch.arange(LENGTH).expand(len(tokens), LENGTH)
    arrays = (x.contiguous().numpy() for x in (tokens, labels, at, torch.zeros_like(at).int()))
    return [Micro(*arrays, torch.arange(len(tokens)).numpy(), {})]


def gradients_of(transport, folder, kind, words):
    """For workers: the gradients of the adapter on a layout, by name."""
    plan = plan_of(folder, kind, words)
    base, low = read_folder(folder / "base", plan.shape), low_of(folder, plan)
    with connect_mesh(plan.layout, transport, CPU) as mesh:
        placed = apply(plan, mesh=mesh, fill=beside_base(by_pieces(low), base, is_adapter))
        context = StepContext(placed, mesh, plan.method, 0)
        labels = batch_of(0)[3] if kind == "t5" else rows()[1]
        given = micros(kind, plan, mesh.index_of("dp"))
        accumulate(context, given, step=0, tokens=int((labels != MASKED).sum()))
        trained = [weight.name for weight in plan.weights if weight.rate]
        return {name: full_gradient(placed, name).numpy() for name in trained}


@pytest.mark.usefixtures("widened")
@pytest.mark.parametrize("kind", TARGETS)
def test_gradients_and_files_are_those_of_peft(workers, tmp_path, kind):
    model = adapted_model(tmp_path, kind)
    logits, labels = logits_of(model, kind)
    F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=MASKED).backward()
    theirs = {
        name.replace(".default", ""): weight.grad
        for name, weight in model.named_parameters()
        if weight.grad is not None
    }
    plan = plan_of(tmp_path, kind, "single x1")
    modules = {one.ours[0]: one.name.removesuffix(".weight") for one in names(plan.shape)}
    for words in ("single x1", "tp2 sp x1", "dp2 zero3 x1", "pp2 x1"):
        ranks = parse_layout(words).world
        (mine, *_) = workers.run(gradients_of, tmp_path, kind, words, ranks=ranks)
        assert len(mine) == len(theirs) == 2 * len(plan.marks.adapted)
        for name, gradient in mine.items():
            path, side = name.removesuffix(".weight").rsplit(".lora_", 1)
            expected = theirs[
                f"base_model.model.{modules[f'{path}.weight']}.lora_{side.upper()}.weight"
            ].numpy()
            assert abs(gradient - expected).max() <= 1e-10 * abs(expected).max(), (words, name)
    write_peft(
        tmp_path / "ours",
        shape=plan.shape,
        adapter=plan.method.adapter,
        targets=[*plan.marks.adapted],
        base=(str(tmp_path / "base"), 5),
        tensor=low_of(tmp_path, plan),
    )
    auto = type(model.get_base_model()).from_pretrained(tmp_path / "base", dtype=torch.float64)
    auto.config._experts_implementation = "eager"
    loaded = peft.PeftModel.from_pretrained(auto, tmp_path / "ours").to(torch.float64).eval()
    with torch.no_grad():
        found, expected = (logits_of(one, kind)[0] for one in (loaded, model.eval()))
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)
