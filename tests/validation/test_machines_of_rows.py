"""The device of a row, in any spelling, and the links that the row names."""

import pytest

from howdah.validation.machines import cluster_of
from howdah.validation.rows import Row


def cluster(gpu, devices=16, **columns):
    return cluster_of(Row({"gpu": gpu, **columns}), devices)


@pytest.mark.parametrize(
    ("text", "name", "memory", "rate"),
    [
        ("A100", "A100 SXM4 80 GB", 80, 312),
        ("NVIDIA A100-SXM4-40GB", "A100 SXM4 40 GB", 40, 312),
        ("A100 80GB PCIe", "A100 PCIe 80 GB", 80, 312),
        ("A100 PCIe 40GB", "A100 PCIe 40 GB", 40, 312),
        ("A800-80GB", "A800 80 GB", 80, 312),
        ("H100-80GB-SXM", "H100 SXM5 80 GB", 80, 989),
        ("H100 PCIe", "H100 PCIe", 80, 756),
        ("H100-96GB-HBM2e (500 W, Grand Teton, 2.4 TB/s)", "H100 96 GB HBM2e", 96, 989),
        ("H800", "H800 SXM 80 GB", 80, 989),
        ("H20", "H20", 96, 148),
        ("H200 141GB", "H200 SXM 141 GB", 141, 989),
        ("B200-180GB", "B200 SXM", 192, 2250),
        ("GB200-192GB", "B200 of GB200", 186, 2500),
        ("GB300-288GB", "B300 of GB300", 288, 2500),
        ("B300-288GB", "B300 SXM", 288, 2250),
        ("L40S", "L40S", 48, 362),
        ("AMD Instinct MI300X", "MI300X", 192, 1307.4),
        ("MI250X", "MI250X die", 64, 191.5),
        ("H100 NVL 94GB", "H100 NVL", 94, 835),
        ("GH200", "H100 of GH200", 96, 989),
        ("A10G", "A10G", 24, 70),
        ("RTX 6000 Ada", "RTX 6000 Ada", 48, 364),
        ("Intel Gaudi2", "Gaudi 2", 96, 432),
        ("TPU v5p-128", "TPU v5p", 102, 459),
        ("TPU v4", "TPU v4", 34, 275),
        ("TPU v6e", "TPU v6e", 32, 918),
        ("TPU v3-1024", "TPU v3", 32, 123),
        ("Intel Max 1550 (PVC) tile", "Max 1550 tile", 64, 419),
        ("AWS Trainium2", "Trainium 2", 96, 667),
        ("AWS trn1.32xlarge", "Trainium", 32, 190),
        ("Biren BR104, 256 TFLOP/s", "Biren BR104, 256 TFLOP/s", 80, 256),
    ],
)
def test_devices(text, name, memory, rate):
    device = cluster(text).device
    assert (device.name, round(device.memory / 1e9)) == (name, memory)
    assert device.flops.bf16 == rate * 1e12


def test_a_board_of_stated_power():
    assert cluster("H100-96GB-HBM2e (500 W, Grand Teton)").device.watts == 500
    assert cluster("H100-80GB").device.watts == 700


def test_a_device_that_nobody_described():
    assert cluster("Abacus 2") == (
        "device Abacus 2 is not known; write its dense peak behind its name, as in "
        "'Abacus 2 400 TFLOP/s'"
    )
    assert cluster("Abacus 0 TFLOP/s").startswith("device Abacus 0 TFLOP/s is not known")
    assert cluster("") == "device not published"


@pytest.mark.parametrize(
    ("text", "nics", "each"),
    [
        ("8x200Gb/s HDR IB per node (Selene)", 8, 25e9),
        ("4x Omni-Path 100Gb/s per node", 4, 12.5e9),
        ("4x100Gb/s RoCE per node", 4, 12.5e9),
        ("1600 Gb/s RoCE per node", 8, 25e9),
        ("400 Gb/s RDMA per GPU", 8, 50e9),
        ("3.2 Tb/s EFA per node", 8, 50e9),
        ("NDR InfiniBand", 8, 50e9),
        ("unstated (MosaicML H100 cluster)", 8, 50e9),
        ("", 8, 50e9),
    ],
)
def test_links_between_nodes(text, nics, each):
    found = cluster("H100", inter_link=text, gpus_per_node="8")
    assert (found.nodes, found.nics) == (2, nics)
    assert found.between.bandwidth == pytest.approx(each)


def test_a_measured_link_is_taken_as_it_is():
    found = cluster(
        "V100-32GB-SXM2", inter_link="Omni-Path (measured all-reduce 64 Gb/s)", gpus_per_node="4"
    )
    assert (found.devices_per_node, found.nics) == (4, 1)
    assert ("between.bandwidth", pytest.approx(8e9)) in found.measured


def test_links_inside_a_node():
    assert cluster("A100", intra_link="NVLink3 600GB/s bidir").inside.bandwidth == 300e9
    assert cluster("A100", intra_link="PCIe 4").inside.name == "pcie4"
    assert cluster("A100 PCIe").inside.name == "pcie4"
    assert cluster("A800", intra_link="NVLink3 400GB/s").inside.bandwidth == 200e9
    assert cluster("H100", intra_link="NVLink4 900 GB/s").inside.bandwidth == 450e9


def test_a_rack_that_one_nvlink_joins_is_a_node():
    joined = {"intra_link": "NVL72 NVLink5 1.8TB/s bidir", "gpus_per_node": "4"}
    assert cluster("GB200-192GB", 64, **joined).devices_per_node == 64
    found = cluster("GB300-288GB", 256, **joined)
    assert (found.devices_per_node, found.nodes, found.inside.bandwidth) == (64, 4, 900e9)


def test_what_was_measured_of_another_device_is_not_taken_over():
    names = {name for name, _ in cluster("A100 80GB PCIe").measured}
    assert "inside.bandwidth" not in names
    assert "device.flops.bf16" not in {name for name, _ in cluster("H100 PCIe").measured}


def test_a_slice_that_is_large_enough():
    assert cluster("TPU v5p-128", 64).devices == 64
    several = cluster("TPU v5p", 20000)
    assert several.network.dims == (16, 16, 24 * 4) and several.devices >= 20000
