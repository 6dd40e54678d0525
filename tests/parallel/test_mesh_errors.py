"""An error on one rank ends the run: nobody waits for what that rank would have sent."""

import pytest
import torch

from howdah.comm.rendezvous import choose
from howdah.parallel.mesh import connect_mesh
from howdah.plan.layout import parse_layout


def fail_on_rank_0(transport, kind):
    """Rank 0 fails while a receive of its own is under way; rank 1 waits for rank 0.

    What each was told.
    """
    own = choose(
        torch.distributed.PrefixStore(kind, transport.among.store),
        rank=transport.rank,
        size=2,
        transport=kind,
        seconds=600,
    )
    try:
        with connect_mesh(parse_layout("tp2"), own, torch.device("cpu")) as mesh:
            x = torch.zeros(10)
            if mesh.rank == 0:
                mesh.tp.receive(x, 1, async_op=True)
                raise ValueError("out of memory")
            mesh.tp.receive(x, 0)
    except Exception as error:
        return type(error).__name__, str(error)
    finally:
        own.close()


@pytest.mark.parametrize("kind", ["engine", "torch"])
def test_an_error_on_one_rank_reaches_all_at_once(workers, kind):
    """Closing waited for the progress thread, which waited for a rank that waited for this one:
    the deadline of ten minutes passed, and the other rank was told of that and not of the error.
    """
    first, second = workers.run(fail_on_rank_0, kind, ranks=2)
    assert first == ("ValueError", "out of memory")
    if kind != "torch":
        assert second[0] == "PeerLost" and "rank 0" in second[1] and "gave up" in second[1]
    else:
        assert "imed out" not in second[1]  # that rank 0 is gone, or what it called
