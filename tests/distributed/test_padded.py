"""Plans for GPUs, whose shares are padded to be equal, run on CPUs: equal to one device, predicted
bytes are counted bytes, and checkpoints pass between both kinds.
"""

from dataclasses import replace

import pytest
import torch
from small_cases import case_of
from small_runs import copy_until, tensors, train_on

from howdah.plan.plan import for_gpus
from howdah.verify.case import Case
from howdah.verify.verify import report, verify


class Padded(Case):
    """A case with the plan of a run on GPUs."""

    @property
    def plan(self):
        return for_gpus(super().plan)


def padded(words):
    case = case_of(words)
    return Padded(**vars(case))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "words",
    ["dp3 zero1 x1", "dp3 zero2 x2", "dp3 zero3 x1", "dp4 zero3 shard2 x2", "dp2 tp2 zero2 x1"],
)
def test_padded_shares_equal_one_device(workers, words):
    case = padded(words)
    assert replace(case.plan, share_align=1) != case.plan
    verdict = verify(case, workers, controls=False)
    assert verdict.proved, "\n".join(report(verdict))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("first", ["plain", "padded"])
def test_checkpoints_pass_between_both_kinds_of_shares(workers, make_job, tmp_path, first):
    def job(name, layout, kind):
        made = make_job(name, f"layout={layout}")
        return replace(made, plan=for_gpus(made.plan)) if kind == "padded" else made

    then = "padded" if first == "plain" else "plain"
    train_on(workers, job("a", "dp3 zero3", first))
    expected = tensors(tmp_path / "a", 20)
    folder = copy_until(tmp_path / "a", tmp_path / "b", 10)
    train_on(workers, job("b", "dp3 zero3", then))
    found = tensors(folder, 20)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-6)
