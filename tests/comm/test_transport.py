"""Transports: what is sent arrives, in order for each pair of ranks, and is counted."""

import numpy as np
import pytest
import torch

from howdah.comm.transport import Alone


def test_alone_has_nobody_to_talk_to():
    transport = Alone()
    assert (transport.rank, transport.size, transport.link) == (0, 1, "none")
    assert transport.exchange([], []) == 0
    with pytest.raises(AssertionError):
        transport.exchange([(torch.zeros(1), 0)], [])


def everyone_to_everyone(transport):
    """Two messages to each peer: [me, peer, 0] and the longer [me, peer, 1, 1]."""
    peers = [peer for peer in range(transport.size) if peer != transport.rank]
    sends, receives = [], []
    for peer in peers:
        sends.append((torch.tensor([transport.rank, peer, 0]), peer))
        sends.append((torch.tensor([transport.rank, peer, 1, 1]), peer))
        receives += [(torch.zeros(3, dtype=torch.int64), peer)]
        receives += [(torch.zeros(4, dtype=torch.int64), peer)]
    sent = transport.exchange(sends, receives)
    heard = [tensor.tolist() for tensor, _ in receives]
    return (transport.rank, transport.size, transport.link), sent, heard


@pytest.mark.parametrize("size", [2, 3, 4])
def test_messages_of_a_pair_arrive_in_order(workers, size):
    for rank, (place, sent, heard) in enumerate(workers.run(everyone_to_everyone, ranks=size)):
        peers = [peer for peer in range(size) if peer != rank]
        assert place == (rank, size, "tcp")
        assert sent == len(peers) * (3 + 4) * 8
        assert heard == [m for p in peers for m in ([p, rank, 0], [p, rank, 1, 1])]


def across(transport, dtype):
    """Rank 0 sends a view into the middle of a buffer; rank 1 receives into the middle."""
    buffer = torch.arange(10).to(dtype) if transport.rank == 0 else torch.zeros(10, dtype=dtype)
    middle = [(buffer[3:7], 1 - transport.rank)]
    sent = transport.exchange(*((middle, []) if transport.rank == 0 else ([], middle)))
    return sent, buffer.to(torch.float64).numpy()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_views_are_sent_and_filled_in_place(workers, dtype):
    (sent, _), (unsent, heard) = workers.run(across, dtype, ranks=2)
    assert (sent, unsent) == (4 * dtype.itemsize, 0)
    np.testing.assert_array_equal(heard, [0, 0, 0, 3, 4, 5, 6, 0, 0, 0])
