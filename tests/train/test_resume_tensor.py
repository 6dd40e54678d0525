"""Parts of matrices and whole ones are one checkpoint: either goes on from what the other saved."""

import pytest
import torch
from small_runs import copy_until, losses, opened, train_on

from howdah.model.hub import read_hub
from howdah.parallel.apply import apply
from howdah.parallel.mesh import connect_mesh
from howdah.parallel.whole import full_parameter, full_state, parameter_names
from howdah.train.opened import open_run
from howdah.train.resume import read_folder, read_weights
from howdah.train.state import restore_states

# Nothing divides: heads and columns of two sizes, and a vocabulary that is odd.
UNEVEN = ["model.heads=3", "model.width=36", "model.ffn=65", "model.vocab=301"]


@pytest.mark.parametrize(
    ("saved", "layouts"),
    [("dp2", ["tp2", "tp3 sp", "dp2 tp2 zero2 sp"]), ("tp2 sp", ["single", "dp2 zero1", "tp3"])],
)
def test_a_run_goes_on_with_other_parts(workers, make_job, tmp_path, saved, layouts):
    train_on(workers, make_job("a", f"layout={saved}", *UNEVEN))
    never_changed, sample = losses(tmp_path / "a"), opened(tmp_path / "a", 20).samples
    for layout in layouts:
        folder = copy_until(tmp_path / "a", tmp_path / layout, 10)
        train_on(workers, make_job(layout, f"layout={layout}", *UNEVEN))
        assert opened(folder, 20).samples == sample
        assert losses(folder) == pytest.approx(never_changed, rel=1e-6)


def what_is_read(transport, job, folder, hub):
    """Weights and moments of a checkpoint, and the weights of an export, through a layout."""
    mesh = connect_mesh(job.layout, transport, torch.device("cpu"))
    checkpoint = opened(folder, 4)
    placed = apply(job.plan, mesh=mesh, fill=read_weights(checkpoint))
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
    for saved, read in (("dp2", "tp3 sp"), ("tp2 sp", "dp2")):
        folder = tmp_path / saved
        train_on(workers, make_job(saved, f"layout={saved}", "pace.steps=4", *UNEVEN))
        open_run(folder, say=print).export(tmp_path / f"{saved} hub")
        _, theirs = read_hub(tmp_path / f"{saved} hub")
        job = make_job("b", f"layout={read}", *UNEVEN)
        given = job, folder, tmp_path / f"{saved} hub"
        found = workers.run(what_is_read, *given, ranks=job.layout.world)[0]
        for (kind, name), tensor in found.items():
            wanted = theirs(name) if kind == "export" else opened(folder, 4).tensor(kind, name)
            assert torch.equal(tensor, wanted.to(tensor.dtype)), (kind, name)
