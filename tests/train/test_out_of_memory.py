"""A rank without memory: one sentence on what would take less, and a run that ends clean."""

import re
from unittest.mock import patch

import pytest
import torch

from howdah.base.errors import Unfinished, UserError
from howdah.checkpoint.folders import steps
from howdah.comm.launch import Terms, launch
from howdah.comm.rendezvous import choose
from howdah.comm.transport import SingleRank
from howdah.host.measured import Capacity
from howdah.train import loop
from howdah.train.out_of_memory import sentence

# torch 2.13's own words
SAID = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 1 has a total capacity of 79.11 GiB of "
    "which 1.02 GiB is free. Including non-PyTorch memory, this process has 78.08 GiB in use."
)
CARD = Capacity("NVIDIA H100 80GB HBM3", 85 * 10**9)


def told(job, there=CARD, said=SAID, rank=0):
    return sentence(job.plan, rank, there, said=said, folder=job.folder)


def command(sentence):
    """The settings of the first command that a sentence names."""
    return re.search(r"howdah train \S+ layout='([^']*)' (batch\.micro_batch=\d+) ", sentence)


def test_the_sentence_has_the_plan_the_card_and_what_takes_less(make_job, tmp_path):
    job = make_job("a", "layout=dp2 x1")
    found = told(job, rank=1)
    assert found.startswith(
        "rank 1 ran out of memory on NVIDIA H100 80GB HBM3 (85 GB) where a tensor wanted 2.50 GiB "
        "more; 'dp2 x1' with micro-batches of 3 counts "
    )
    assert "MB for it (activations " in found and "\n" not in found
    assert (
        f"; go on with: howdah train {tmp_path / 'a'} layout='dp2 x2' batch.micro_batch=2" in found
    )


def test_what_is_named_is_accepted_and_is_the_same_step(make_job):
    """Also where the recipe says its own micro-batch."""
    job = make_job("a", "layout=dp2", "batch.micro_batch=3")
    layout, micro = command(told(job)).groups()
    after = make_job("a", f"layout={layout}", micro)
    assert after.batch.global_batch == job.batch.global_batch
    assert after.batch.micro_batch < job.batch.micro_batch


@pytest.mark.parametrize(
    ("there", "words"),
    [
        (Capacity("L4", 24 * 10**9, 2), "on L4 (24 GB for 2 ranks) where"),
        (Capacity("L4", 24 * 10**9, 1, 9 * 10**9), "hold 9 GB) where"),
        (Capacity("L4", 24 * 10**9, 1, 10**8), "on L4 (24 GB) where"),
        (Capacity("this machine", 0), "on this machine where"),
    ],
)
def test_a_card_that_others_use_too_is_told(make_job, there, words):
    assert words in told(make_job("a"), there)


def test_where_nothing_helps_it_says_so(make_job):
    job = make_job("a", "batch.global_batch=1")
    tiny = Capacity("a card", 1000)
    assert told(job, tiny).endswith(
        "; nothing near it takes less: take more ranks, or a smaller model"
    )
    assert " where a tensor" not in told(job, tiny, said="CUDA out of memory")


def test_other_ranks_have_their_own_part():
    assert Capacity("a", 80, 2, others=40).each == 40
    assert Capacity("a", 80, 1, others=40).each == 40


# -- in runs -----------------------------------------------------------------------


def full(*_, **__):
    raise torch.OutOfMemoryError(SAID)


@pytest.mark.parametrize("moment", ["place", "train_step"])
def test_one_rank_without_memory_ends_with_the_sentence(make_job, moment):
    job = make_job("a")
    with patch.object(loop, moment, full), pytest.raises(Unfinished) as ended:
        loop.train(job, SingleRank())
    assert str(ended.value).startswith("rank 0 ran out of memory on this machine (")
    assert make_job("a", f"layout={command(str(ended.value))[1]}", "batch.micro_batch=3")


def test_other_errors_stay_what_they_are(make_job):
    for error in (RuntimeError("a defect"), UserError("a mistake")):
        with (
            patch.object(loop, "train_step", side_effect=error),
            pytest.raises(type(error), match=str(error)),
        ):
            loop.train(make_job("a"), SingleRank())


def train_until_full(seat, job, victim, at):
    """For a launched rank: trains, until the victim's device is full in step `at`."""
    step_of = loop.train_step

    def fill(context, batch, *, step, **rest):
        if seat.rank == victim and step == at:
            raise torch.OutOfMemoryError(SAID)
        return step_of(context, batch, step=step, **rest)

    with patch.object(loop, "train_step", fill):
        transport = choose(seat.store, rank=seat.rank, size=seat.size)
        return loop.train(job, transport, local_rank=seat.rank).signal


@pytest.mark.parametrize(
    ("victim", "layout"), [(1, "dp2 x3"), pytest.param(0, "pp2 1f1b x3", marks=pytest.mark.slow)]
)
def test_a_run_ends_clean_on_all_ranks(make_job, tmp_path, victim, layout):
    """As after other failures of the machine: exit code 1, one sentence, the last save is whole."""
    job = make_job("a", f"layout={layout}", "train.save_every=2")
    ending = launch(train_until_full, [job, victim, 5], Terms(ranks=2, save_seconds=60), say=print)
    assert (ending.code, ending.kind) == (1, "limit")
    assert ending.why.startswith(f"rank {victim} ran out of memory on this machine (")
    assert command(ending.why) and "\n" not in ending.why
    assert steps(tmp_path / "a" / "checkpoints") in ([2, 4], [2])
    assert not [*(tmp_path / "a" / "checkpoints").glob("*.part")]
