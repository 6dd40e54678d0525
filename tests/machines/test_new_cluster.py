"""`howdah cluster new`: a sound file from a few answers, or one sentence."""

import pytest

from howdah.base.errors import UserError
from howdah.machines.cluster_file import load_cluster
from howdah.machines.cluster_tables import parse_cluster
from howdah.machines.new_cluster import Answers, cluster_like, cluster_text, known_devices, usual


def made(**answers):
    return parse_cluster(cluster_text(Answers(name="ours", **answers)), file="ours")


@pytest.mark.parametrize("device", [*known_devices()])
def test_a_shipped_device_brings_its_own_numbers(device):
    """Its links, too: MI300X was asked for one, because no other device has its link."""
    links = {key: usual(device)[key] for key in ("inside", "between")}
    cluster = made(device=device, devices=2, nodes=3, nics=4, **links)
    shipped = load_cluster(cluster_like(device))
    assert cluster.device == shipped.device and cluster.devices == 6
    assert cluster.efficiency == shipped.efficiency and cluster.inside == shipped.inside
    assert cluster.between.name == links["between"] and cluster.nics == 4


def test_another_device_is_what_is_said_of_it():
    words = {"memory": "24", "bandwidth": "900 GB/s", "bf16": "100", "inside": "pcie4"}
    cluster = made(device="Chip 1", devices=4, nodes=3, between="25 Gb/s", nics=2, **words)
    assert (cluster.device.name, cluster.device.memory, cluster.devices) == ("Chip 1", 24e9, 12)
    assert cluster.device.flops.bf16 == 100e12 and cluster.device.bandwidth == 900e9
    assert cluster.between.bandwidth == pytest.approx(25e9 / 8) and cluster.nics == 2


def test_a_price_is_of_a_node():
    cluster = made(device="h100", devices=8, price_per_hour="40")
    assert (cluster.price_per_hour, cluster.rent_of_device) == (40.0, 5.0)


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ({"device": "RTX 4091"}, "does not ship; did you mean 'RTX 4090'"),
        ({"device": "h100", "inside": "nvlink"}, "--inside must be a known link"),
        ({"device": "h100", "nodes": 2, "between": "fast"}, "--between must be a known link"),
        ({"device": "h100", "price_per_hour": "lots"}, "price_per_hour"),
        ({"device": "h100", "price_per_hour": "0"}, "price_per_hour is .0 USD/h.; it must be from"),
        ({"device": "h100", "host_memory": "0 W"}, "host.memory"),
    ],
)
def test_what_makes_no_sound_file_is_one_sentence(answers, said):
    with pytest.raises(UserError, match=said):
        made(**answers)
