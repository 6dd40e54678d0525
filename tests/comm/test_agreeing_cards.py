"""How ranks agree on the wire between their GPUs. No GPU is needed to agree."""

import pytest
import torch
import torch.distributed as dist

from howdah.base.errors import UserError
from howdah.comm.cards import Card, agree_on_cards, card_of
from howdah.comm.rendezvous import choose


def card(number, nccl="2.29.7"):
    return Card(f"GPU-{number}", "NVIDIA H200", nccl)


def test_ranks_without_gpus_need_no_wire_for_them():
    assert agree_on_cards([None, None]) == (False, "")
    assert card_of(torch.device("cpu")) is None


def test_a_gpu_for_each_rank_is_for_nccl():
    assert agree_on_cards([card(0), card(1), card(2)]) == (True, "")


def test_ranks_that_share_a_gpu_go_through_the_host():
    by_nccl, why = agree_on_cards([card(0), card(1), card(0)])
    assert not by_nccl
    assert why.startswith("ranks 0 and 2 share one GPU (NVIDIA H200)")
    assert why.endswith("start one rank for each GPU")


def test_a_torch_without_nccl_goes_through_the_host():
    by_nccl, why = agree_on_cards([card(0), card(1, nccl="")])
    assert not by_nccl and why.startswith("torch has no NCCL on the machine of rank 1")


@pytest.mark.parametrize(
    ("cards", "said"),
    [
        ([None, card(0)], "rank 1 computes on a GPU and rank 0 on a CPU: give all machines"),
        ([card(0), card(1), None], "rank 0 computes on a GPU and rank 2 on a CPU"),
        ([card(0), card(1, "2.28.9")], "rank 0 has NCCL 2.29.7 and rank 1 NCCL 2.28.9: install"),
    ],
)
def test_ranks_that_do_not_fit_together_are_refused(cards, said):
    with pytest.raises(UserError, match=said):
        agree_on_cards(cards)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("nccl", "transport=nccl: no rank has a GPU"),
        ("mpi", "transport=mpi needs a torch that was built with MPI"),
        ("ncl", "there is no transport 'ncl'; did you mean 'nccl'"),
    ],
)
def test_what_is_not_here_is_refused_by_all_ranks(workers, kind, said):
    if kind == "mpi" and dist.is_mpi_available():
        pytest.skip("this torch was built with MPI")
    for told in workers.run(refused, kind, ranks=2):
        assert told.startswith(said)


def refused(transport, kind):
    """What a rank is told that asks for this kind; no other rank is needed to refuse it."""
    store = dist.HashStore()
    for rank in range(2):  # the other rank has come, too
        other = dist.PrefixStore("", store)
        other.set(f"hello/{rank}", hello(kind))
    with pytest.raises(UserError) as told:
        choose(dist.PrefixStore("", store), rank=transport.rank, size=2, transport=kind, seconds=9)
    return str(told.value)


def hello(kind):
    import json
    from dataclasses import asdict

    from howdah.comm.meeting import own_hello

    return json.dumps(asdict(own_hello(kind)))
