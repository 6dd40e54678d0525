"""Lightning's Fabric on the torch backend, where `lightning-fabric` is installed."""

import pytest
import torch
import torch.distributed as dist
from test_backend_users import batch, bits, net
from torch_ranks import ranks_of

pytestmark = pytest.mark.slow


def with_fabric(rank):
    """Trains some steps by Fabric, which takes the group that is there."""
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.environments import TorchElasticEnvironment
    from lightning_fabric.strategies import DDPStrategy

    with pytest.MonkeyPatch.context() as patch:
        facts = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
        for name, value in (facts | {"GROUP_RANK": 0}).items():
            patch.setenv(name, str(value))
        strategy = DDPStrategy(
            process_group_backend=dist.get_backend(),
            cluster_environment=TorchElasticEnvironment(),
        )
        fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
        fabric.launch()
        model = net()
        model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        for step in range(3):
            fabric.backward(model(batch(rank, step)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        total = fabric.all_reduce(torch.tensor([float(rank)]), reduce_op="sum")
        heard = fabric.all_gather(torch.tensor([float(rank)]))
    return bits(model.parameters()), total.item(), heard.flatten().tolist(), dist.get_backend()


def test_fabric_trains_to_the_bits_of_gloo(workers, tmp_path):
    pytest.importorskip("lightning_fabric")
    ours, theirs = (ranks_of(workers, tmp_path, name)(with_fabric) for name in ("howdah", "gloo"))
    assert [one[:3] for one in ours] == [one[:3] for one in theirs]
    assert ours[0][1:] == (1.0, [0.0, 1.0], "howdah")
    assert ours[0][0] == ours[1][0]
