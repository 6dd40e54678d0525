"""The text of `howdah cluster`: golden tables."""

import pytest

from howdah.draw.cluster import check_cluster, list_clusters, show_cluster
from howdah.machines.cluster_file import cluster_names, load_cluster

H100 = """\
h100: DGX H100: 8 H100 of 80 GB behind NVSwitch, a 400 Gb/s card for each
16 devices: 2 x 8 H100 SXM5 80 GB
network: switches over 32 nodes 1:1; 400 GB/s between its halves

                                   nominal     counted on
device.memory                        80 GB          80 GB
device.bandwidth                 3.35 TB/s      2.68 TB/s  assumed: 0.8 of nominal
device.flops.float64            67 TFLOP/s  52.26 TFLOP/s  assumed: 0.78 of nominal
device.flops.float32            67 TFLOP/s  52.26 TFLOP/s  assumed: 0.78 of nominal
device.flops.tf32              494 TFLOP/s  385.3 TFLOP/s  assumed: 0.78 of nominal
device.flops.fp16              989 TFLOP/s    794 TFLOP/s  measured
device.flops.bf16              989 TFLOP/s    794 TFLOP/s  measured
device.flops.fp8             1.979 PFLOP/s  1.544 PFLOP/s  assumed: 0.78 of nominal
inside.bandwidth (nvlink4)        450 GB/s     337.5 GB/s  assumed: 0.75 of nominal
inside.latency                      3.4 us         3.4 us
between.bandwidth (8 x ndr)        50 GB/s        40 GB/s  assumed: 0.8 of nominal
between.latency                      14 us          14 us
host.link.bandwidth (pcie5)        63 GB/s        63 GB/s
host.link.latency                   5.7 us         5.7 us
host.disk_bandwidth                50 GB/s        50 GB/s

host: 2 TB of memory at 307 GB/s, 30.7 TB of disk
reserved on a device: 1.503 GB
power: 700 W, idle 70 W; PUE 1.1, 385 g/kWh
price: 25000 USD; rent: not stated"""


def test_a_cluster_in_full():
    assert "\n".join(show_cluster(load_cluster("h100x16"))) == H100


def test_a_slice_of_a_pod_shows_its_grid_and_no_link_inside():
    lines = show_cluster(load_cluster("tpu-v5px32"))
    assert lines[2] == (
        "network: grid of 2 x 4 x 4, wrapping around in the dims of 4, 4; "
        "1.6 TB/s between its halves"
    )
    assert not any(line.startswith("inside") for line in lines)
    assert "between.bandwidth (ici)        100 GB/s      90 GB/s  measured" in lines


def test_a_lone_node_shows_no_link_between():
    lines = show_cluster(load_cluster("laptop-cpu"))
    assert lines[2] == "network: flat; 12.7 GB/s between its halves"
    assert not any(line.startswith("between") for line in lines)


@pytest.mark.parametrize("name", cluster_names())
def test_every_cluster_can_be_shown(name):
    lines = show_cluster(load_cluster(name))
    assert all(line == line.rstrip() and len(line) <= 100 for line in lines)
    assert not any("None" in line or "e+" in line for line in lines)


def test_the_list_has_a_line_for_each():
    lines = list_clusters()
    assert [line.split()[0] for line in lines] == cluster_names()
    words = lines[cluster_names().index("h100")].split(maxsplit=2)
    assert words[:2] == ["h100", "8"] and words[2].startswith("DGX H100: 8 H100 of 80 GB")


def test_the_check_says_what_is_left_open():
    assert check_cluster(load_cluster("h100x16")) == ["h100: sound, 2 x 8 H100 SXM5 80 GB"]
    assert check_cluster(load_cluster("tpu-v5e")) == [
        "tpu-v5e: sound, 32 x 8 TPU v5e",
        "  device.reserved is not given: plans take all of a device's memory as free",
        "  device.watts is not given: energy and carbon stay unknown",
    ]
    assert check_cluster(load_cluster("b300"))[1:] == [
        "  device.price or rent is not given: the cost of a run stays unknown",
        "  measured is not given: plans count on assumed shares of the nominal numbers",
    ]
