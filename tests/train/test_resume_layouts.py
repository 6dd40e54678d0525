"""One run, many layouts: a run that changes its layout at every checkpoint is one that never did.

Nothing divides: heads, columns, vocabulary, layers, and the batch. The rate and its warm-up go on,
and the batch grows, so that a step or a sample that is counted anew is noticed.
"""

import json
import re

import pytest
import torch
from small_runs import losses, metrics, opened, samples_of, tensors, train_on, train_watched

from howdah.model.hub import read_hub
from howdah.parallel.apply import apply
from howdah.parallel.full_tensors import full_parameter, full_state, parameter_names
from howdah.parallel.mesh import connect_mesh
from howdah.train.finished_run import open_run
from howdah.train.resume import read_folder, read_weights
from howdah.train.state import restore_states

UNEVEN = ["model.heads=3", "model.width=36", "model.ffn_size=65", "model.vocab=301"]
LEG = 2  # steps between checkpoints
LAYOUTS = (
    *("dp2", "tp2", "pp2", "dp2 pp2 zero1", "dp2 server2", "dp2 zero3", "dp2 tp2 zero3"),
    *("pp2 tp2 sp", "tp3 sp", "dp2 server1 update=workers", "dp2 tp2 zero2 sp"),
    *("pp2 interleaved v2", "dp1"),
)
SETTINGS = [
    *(*UNEVEN, "model.layers=3", "model.tie_embeddings=true", "method.dropout=0.1"),
    *("method.lr.warmup_steps=4", "method.lr.schedule=inverse_sqrt"),
    *("batch.global_batch=7", "batch.micro_batch=2"),
    *("batch.ramp_from=3", f"batch.ramp_steps={LEG * len(LAYOUTS)}"),
    *(f"train.save_every={LEG}", "train.keep_last=20", "train.evaluate_samples=0"),
]

# How far losses may be apart, as a share, and elements of weights and moments, as a share of the
# largest of their tensor. Losses: docs/numerics.md. Elements: in float32 four times what layouts
# that are right in float64 were measured to differ; float64, at a ten-millionth, is the proof.
BOUNDS = {"float64": (1e-10, 1e-12), "float32": (1e-6, 1e-5)}


@pytest.fixture
def documents(tmp_path):
    """A file of sixty documents, of which six are held out: little to evaluate, enough to read."""
    lines = (
        " ".join(f"{n} follows {n - 1}, says {number}" for n in range(number, number + 12))
        for number in range(60)
    )
    path = tmp_path / "documents.jsonl"
    path.write_text("\n".join(json.dumps({"text": line}) for line in lines))
    return path


@pytest.mark.parametrize("precision", ["float64", pytest.param("float32", marks=pytest.mark.slow)])
def test_a_run_that_changes_its_layout_at_every_checkpoint_is_one_that_never_did(
    workers, make_job, documents, tmp_path, precision
):
    settings = [*SETTINGS, f"data.sources=['{documents}']", f"method.precision={precision}"]
    last = LEG * len(LAYOUTS)
    never = make_job("never", f"train.steps={last}", f"train.evaluate_every={LEG}", *settings)
    read = samples_of(workers.run(train_watched, [never], ranks=1))
    changing = {}
    for leg, layout in enumerate(LAYOUTS, 1):
        job = make_job("always", f"layout={layout}", f"train.steps={LEG * leg}", *settings)
        changing |= samples_of(workers.run(train_watched, [job], ranks=job.layout.world))
        assert opened(tmp_path / "always", LEG * leg).layout == str(job.layout)

    assert changing == read  # the same samples in every step, and the same text in them
    numbers = [number for step in range(last) for number, _ in changing[step]]
    assert numbers == list(range(len(numbers))) and len(numbers) > 4 * last

    one, other = tmp_path / "never", tmp_path / "always"
    verdicts = re.findall(r"bytes, counted .*: (.*)", (other / "log.txt").read_text())
    assert verdicts == ["equal"] * (len(LAYOUTS) - 1)  # all but the last, on one device
    loss, share = BOUNDS[precision]
    assert losses(other) == pytest.approx(losses(one), rel=loss)
    for step, row in metrics(one, "held_out_all").items():
        assert metrics(other, "held_out_all")[step]["loss"] == pytest.approx(row["loss"], rel=loss)
    one, other = tensors(one, last), tensors(other, last)
    assert one.keys() == other.keys()
    assert {kind for kind, _ in one} == {"weight", "exp_avg", "exp_avg_sq"}
    for name, tensor in one.items():
        assert (other[name] - tensor).abs().max() <= share * tensor.abs().max(), name


def what_is_read(transport, job, folder, hub):
    """Weights and moments of a checkpoint, and the weights of an export, through a layout."""
    mesh = connect_mesh(job.layout, transport, torch.device("cpu"))
    checkpoint = opened(folder, 4)
    placed = apply(job.plan, mesh=mesh, fill=read_weights(checkpoint, job))
    restore_states(placed, checkpoint)
    found = {("weight", n): full_parameter(placed, n) for n in parameter_names(placed)}
    for state in job.method.optimizer.states:
        found |= {(state, n): full_state(placed, n, state) for n in parameter_names(placed)}
    exported = apply(job.plan, mesh=mesh, fill=read_folder(hub, job.shape))
    found |= {("export", n): full_parameter(exported, n) for n in parameter_names(exported)}
    mesh.close()
    return found


def test_weights_and_moments_are_the_same_through_checkpoints_and_exports(
    workers, make_job, tmp_path
):
    for saved, read in (("dp2", "tp3 sp"), ("tp2 sp", "dp2"), ("pp2 tp2", "dp3 zero3")):
        folder = tmp_path / saved
        train_on(workers, make_job(saved, f"layout={saved}", "train.steps=4", *UNEVEN))
        open_run(folder, say=print).export(tmp_path / f"{saved} hub")
        _, theirs = read_hub(tmp_path / f"{saved} hub")
        job = make_job("b", f"layout={read}", *UNEVEN)
        given = job, folder, tmp_path / f"{saved} hub"
        found = workers.run(what_is_read, *given, ranks=job.layout.world)[0]
        for (kind, name), tensor in found.items():
            wanted = theirs(name) if kind == "export" else opened(folder, 4).tensor(kind, name)
            assert torch.equal(tensor, wanted.to(tensor.dtype)), (kind, name)


EXPERTS = [
    *("model.experts.count=5", "model.experts.top_k=2", "model.experts.ffn_size=11"),
    *("model.experts.shared=9", "model.experts.bias=true", "model.experts.scores=sigmoid"),
    *("method.routing.balance_loss=0.1", "method.routing.bias_rate=0.01"),
    *(
        "method.routing.capacity=1.2",
        "model.heads=2",
        "model.kv_heads=2",
        "method.precision=float64",
    ),
    *("batch.global_batch=5", "batch.micro_batch=2", "train.save_every=2", "train.keep_last=20"),
    "method.lr.schedule=constant",
]


@pytest.mark.slow
def test_experts_keep_their_numbers_through_every_layout(workers, make_job, tmp_path):
    """Stacked experts and the biases of routers are pieces of a checkpoint like others."""
    layouts = ("dp2 zero2", "dp2 ep2 zero1", "tp2 sp", "pp2 zero1 dp2", "dp3 zero3")
    train_on(workers, make_job("never", f"train.steps={2 * len(layouts)}", *EXPERTS))
    for leg, layout in enumerate(layouts, 1):
        train_on(
            workers, make_job("always", f"layout={layout}", f"train.steps={2 * leg}", *EXPERTS)
        )
    one, other = tmp_path / "never", tmp_path / "always"
    assert losses(other) == pytest.approx(losses(one), rel=1e-10)
    verdicts = re.findall(r"bytes, counted .*: (.*)", (other / "log.txt").read_text())
    assert verdicts == ["equal"] * len(layouts)
    one, other = tensors(one, 2 * len(layouts)), tensors(other, 2 * len(layouts))
    assert one["weight", "layers.1.router.bias"].abs().max() > 0.01
    for name, tensor in one.items():
        assert (other[name] - tensor).abs().max() <= 1e-12 * max(tensor.abs().max(), 1e-30), name
    counts = metrics(tmp_path / "always", "train")[8]["experts"]
    assert counts == metrics(tmp_path / "never", "train")[8]["experts"]
    assert [sum(tokens) for tokens in counts.values()] == [5 * 32 * 2] * 2


@pytest.mark.slow
def test_experts_move_between_ranks_from_run_to_run(workers, make_job, tmp_path):
    """Two ranks, four, those that share sequences, and none: a checkpoint knows experts by number.
    Nothing is dropped, so what a rank is sent depends on the data.
    """
    given = [*EXPERTS, "method.routing.capacity=0"]
    layouts = ("dp2 ep2 zero1", "dp4 ep4 zero2", "cp2 ep2", "dp3 zero3")
    train_on(workers, make_job("never", f"train.steps={2 * len(layouts)}", *given))
    for leg, layout in enumerate(layouts, 1):
        job = make_job("always", f"layout={layout}", f"train.steps={2 * leg}", *given)
        train_on(workers, job)
    one, other = tmp_path / "never", tmp_path / "always"
    assert losses(other) == pytest.approx(losses(one), rel=1e-10)
    one, other = tensors(one, 2 * len(layouts)), tensors(other, 2 * len(layouts))
    for name, tensor in one.items():
        assert (other[name] - tensor).abs().max() <= 1e-12 * max(tensor.abs().max(), 1e-30), name
