"""Names of cards as torch spells them: the right peak, or none; never that of another card."""

import pytest

from howdah.machines.cards import device_named
from howdah.machines.cluster_file import cluster_names, load_cluster

# Dense TFLOP/s in bf16 and float32 from the data sheets; None: no shipped cluster has this card.
PEAKS = {
    "NVIDIA A100-SXM4-40GB": (312, 19.5),
    "NVIDIA A100-SXM4-80GB": (312, 19.5),
    "A100-SXM4-40GB": (312, 19.5),  # of drivers before 470
    "A100-SXM-80GB": (312, 19.5),
    "NVIDIA H100 80GB HBM3": (989, 67),
    "NVIDIA H200": (989, 67),
    "NVIDIA B200": (2250, 75),
    "NVIDIA B300 SXM6 AC": (2250, 75),
    "NVIDIA GB300": (2500, 80),
    "Tesla P100-SXM2-16GB": (None, 10.6),
    "Tesla V100-SXM2-16GB": (None, 15.7),
    "Tesla V100-SXM3-32GB": (None, 15.7),
    "NVIDIA GeForce RTX 3090": (71, 35.6),
    "NVIDIA GeForce RTX 4090": (165.2, 82.6),
    "NVIDIA GeForce RTX 5090": (209.5, 104.8),
    "NVIDIA RTX 6000 Ada Generation": (364.2, 91.1),
    "NVIDIA L40S": (362.05, 91.6),
    "NVIDIA L4": (121, 30.3),
    "Tesla T4": (None, 8.1),
    "NVIDIA A10": (125, 31.2),
    "AMD Instinct MI300X": (1307.4, 163.4),
}
UNKNOWN = [
    "NVIDIA A10G",  # 70 TFLOP/s, and not A10's 125
    "NVIDIA A30",
    "NVIDIA A40",
    "NVIDIA A100-PCIE-40GB",
    "NVIDIA A100 80GB PCIe",
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb",  # a seventh of the card
    "NVIDIA A100-SXM-64GB",  # of one supercomputer, with more cores
    "NVIDIA A800-SXM4-80GB",
    "NVIDIA B200 MIG 1g.23gb",
    "NVIDIA GB10",
    "NVIDIA GB200",  # contains B200, and has 2500 for its 2250
    "NVIDIA GH200 480GB",
    "NVIDIA GeForce RTX 3090 Ti",
    "NVIDIA GeForce RTX 4090 D",
    "NVIDIA GeForce RTX 5090 D",
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA H100 NVL",  # 835
    "NVIDIA H100 PCIe",  # 756
    "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
    "NVIDIA H20",  # 148, and the start of H200's name
    "NVIDIA H200 NVL",
    "NVIDIA H800",
    "NVIDIA L40",  # 181, and the start of L40S's name
    "NVIDIA RTX 5000 Ada Generation",
    "NVIDIA RTX A6000",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition",
    "Tesla T40 24GB",
    "Tesla V100-PCIE-32GB",
    "AMD Instinct MI250X / MI250",
    "AMD Instinct MI325X",
    "H100",
    "H100 SXM5 80 GB",  # as the cluster calls it, and not torch
    "",
]


@pytest.mark.parametrize(("name", "peaks"), PEAKS.items())
def test_a_known_card_has_the_peak_of_its_data_sheet(name, peaks):
    flops = device_named(name).flops
    bf16 = flops.bf16 and flops.bf16 / 1e12
    assert (bf16, flops.float32 / 1e12) == (peaks[0], pytest.approx(peaks[1]))


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_card_that_no_cluster_names_is_unknown(name):
    assert device_named(name) is None


def test_every_name_is_tested_and_means_one_kind_of_card():
    """Two clusters of the same cards name them alike, and must give them equal rates."""
    found = {}
    for cluster in cluster_names():
        device = load_cluster(cluster).device
        for name in device.cuda_names:
            assert found.setdefault(name, device.flops) == device.flops, name
    assert set(PEAKS) <= set(found)
    spelled_otherwise = {"A100-SXM4-80GB", "GeForce RTX 3090", "NVIDIA T4"}
    assert set(found) - set(PEAKS) == spelled_otherwise
