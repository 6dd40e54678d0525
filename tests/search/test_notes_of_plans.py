"""What a plan's user is told although nothing is wrong."""

from dataclasses import replace

import pytest

from howdah.config.drafts import Draft, draft
from howdah.machines.cluster_file import load_cluster
from howdah.search.notes import PUBLISHED, notes_on


def notes(model, samples, *keys, cluster=None):
    plan = draft(model, Draft("dp2", global_batch=samples, keys=keys), devices=None).plan
    return notes_on(plan, cluster)


@pytest.mark.parametrize(
    ("model", "samples", "told"),
    [
        (
            "llama2-7b",
            16,
            "a step has 65,536 tokens; published pre-training runs of 1B to 10B",
        ),
        ("llama2-7b", 122, "raise x"),  # just under half of 1M
        ("llama2-7b", 124, ""),
        ("llama2-7b", 1024, ""),  # its own 4M
        ("llama2-7b", 2048, "lower x or the global batch to come nearer"),
        ("gpt3-175b", 1536, ""),  # its own 3.2M
        ("gpt2-124m", 480, ""),  # 0.5M
        ("laptop", 2, ""),  # no run of this size was published
        ("bert-base", 256, ""),  # an encoder
    ],
)
def test_a_batch_far_from_those_of_published_runs(model, samples, told):
    keys = ["data.sequence_length=4096"] if model.startswith("llama") else []
    found = [note for note in notes(model, samples, *keys) if "tokens" in note]
    assert (told in found[0]) if told else found == []


def test_the_table_goes_down_without_gaps():
    assert [row[0] for row in PUBLISHED] == [1e11, 1e10, 1e9, 1e8]
    assert all(fewest < most for *_, fewest, most in PUBLISHED)


def test_memory_that_is_not_stated_as_reserved():
    cluster = load_cluster("h100")
    assert notes("laptop", 2, cluster=cluster) == []
    open_one = replace(cluster, device=replace(cluster.device, reserved=0.0))
    assert "cluster h100 does not say device.reserved" in notes("laptop", 2, cluster=open_one)[0]


def test_a_sum_by_rows_that_cannot_be_is_told():
    found = notes("laptop", 8, "comm.sparse=true")
    assert any("comm.sparse is true, but the embedding is tied" in note for note in found)
