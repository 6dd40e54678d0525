"""The shipped clusters against the data sheets, what a plan counts on, and other sizes."""

import pytest

from howdah.base.errors import UserError
from howdah.machines.cluster import (
    LINKS,
    Cluster,
    Device,
    Efficiency,
    Flops,
    Grid,
    Host,
    Level,
    Link,
    Tree,
    attained,
    expected,
    nominal,
    peak,
    resized,
)
from howdah.machines.cluster_file import FOLDER, cluster_names, load_cluster

SHIPPED = {name: load_cluster(name) for name in cluster_names()}


# -- the device table ----------------------------------------------------------


def test_the_devices_from_p100_to_gb300_the_tpus_and_a_laptop_are_there():
    assert set(SHIPPED) == {
        *("p100", "v100-16", "v100-32", "a100-40", "a100-80", "h100", "h200", "b200", "b300"),
        *("gb300", "tpu-v4", "tpu-v5e", "tpu-v5p", "laptop-cpu", "rack-10gbe", "rack-1gbe"),
        *(
            "h100-24k",
            "rtx-3090",
            "rtx-4090",
            "rtx-5090",
            "rtx-6000-ada",
            "l40s",
            "l4",
            "t4",
            "a10",
        ),
        *("mi300x", "p4d.24xlarge", "p5.48xlarge", "a2-ultragpu-8g"),
    }
    assert all(cluster.name == name for name, cluster in SHIPPED.items())
    assert all(cluster.summary for cluster in SHIPPED.values())


@pytest.mark.parametrize(
    ("name", "memory"),
    [
        ("p100", 16e9),
        ("v100-16", 16e9),
        ("v100-32", 32e9),
        ("a100-40", 40e9),
        ("a100-80", 80e9),
        ("h100", 80e9),
        ("h200", 141e9),
        ("b200", 192e9),
        ("b300", 288e9),
        ("gb300", 288e9),
        ("tpu-v4", 32 * 2**30),
        ("tpu-v5e", 16e9),
        ("tpu-v5p", 95 * 2**30),
    ],
)
def test_memory(name, memory):
    assert SHIPPED[name].device.memory == memory


@pytest.mark.parametrize(
    ("name", "precision", "teraflops"),
    [
        ("p100", "fp16", 21.2),
        ("v100-16", "fp16", 125),
        ("v100-32", "fp16", 125),
        ("a100-40", "bf16", 312),
        ("a100-80", "bf16", 312),
        ("a100-80", "tf32", 156),
        ("h100", "bf16", 989),
        ("h100", "fp8", 1979),
        ("h200", "bf16", 989),
        ("b200", "bf16", 2250),
        ("b200", "fp4", 9000),
        ("b300", "bf16", 2250),
        ("gb300", "fp4", 15000),
        ("tpu-v4", "bf16", 275),
        ("tpu-v5e", "bf16", 197),
        ("tpu-v5p", "bf16", 459),
    ],
)
def test_dense_rates_never_those_with_sparsity(name, precision, teraflops):
    assert peak(SHIPPED[name].device, precision) == teraflops * 1e12


@pytest.mark.parametrize("name", SHIPPED)
def test_narrower_numbers_are_at_least_as_fast(name):
    flops = SHIPPED[name].device.flops
    order = [flops.float64, flops.float32, flops.tf32, flops.bf16, flops.fp8]
    rates = [rate for rate in order if rate is not None]
    assert rates == sorted(rates)
    if flops.fp8 is not None:  # twice bf16: were one of the two with sparsity, four times or once
        assert flops.fp8 == pytest.approx(2 * flops.bf16, rel=0.01)


@pytest.mark.parametrize(
    ("name", "terabytes"),
    [("a100-40", 1.56), ("a100-80", 2.0), ("h100", 3.35), ("b200", 8), ("h200", 4.8)],
)
def test_memory_bandwidth(name, terabytes):
    assert SHIPPED[name].device.bandwidth / 1e12 == pytest.approx(terabytes, rel=0.02)


@pytest.mark.parametrize(
    ("name", "dollars"), [("a100-80", 10_000), ("h100", 25_000), ("b200", 50_000)]
)
def test_prices(name, dollars):
    assert SHIPPED[name].device.price == dollars


@pytest.mark.parametrize(
    ("name", "watts"), [("p100", 300), ("a100-80", 400), ("h100", 700), ("b200", 1000)]
)
def test_watts(name, watts):
    assert SHIPPED[name].device.watts == watts


@pytest.mark.parametrize(
    ("generation", "both_directions"),
    [(1, 160), (2, 300), (3, 600), (4, 900), (5, 1800), (6, 3600)],
)
def test_nvlink_is_half_of_what_is_printed_for_both_directions(generation, both_directions):
    assert LINKS[f"nvlink{generation}"].bandwidth == both_directions * 1e9 / 2


@pytest.mark.parametrize(
    ("name", "link"),
    [
        ("p100", "nvlink1"),
        ("v100-16", "nvlink2"),
        ("a100-40", "nvlink3"),
        ("h100", "nvlink4"),
        ("h200", "nvlink4"),
        ("b200", "nvlink5"),
        ("gb300", "nvlink5"),
    ],
)
def test_the_link_inside(name, link):
    assert SHIPPED[name].inside == LINKS[link]


def test_pcie_and_infiniband():
    assert LINKS["pcie5"].bandwidth == 63e9
    assert LINKS["hdr"].bandwidth == 200e9 / 8
    assert LINKS["ndr"].bandwidth == 400e9 / 8


@pytest.mark.parametrize(
    ("name", "terabits"), [("a100-80", 1.6), ("h100", 3.2), ("b200", 3.2), ("b300", 6.4)]
)
def test_bandwidth_of_a_node(name, terabits):
    cluster = SHIPPED[name]
    assert cluster.nics * cluster.between.bandwidth * 8 / 1e12 == pytest.approx(terabits)


@pytest.mark.parametrize(
    ("name", "gigabits", "wires"), [("tpu-v4", 2400, 6), ("tpu-v5e", 1600, 4), ("tpu-v5p", 4800, 6)]
)
def test_what_a_tpu_sends_over_all_its_wires(name, gigabits, wires):
    assert SHIPPED[name].between.bandwidth * 8 / 1e9 * wires == gigabits


def test_a_rack_of_gb300_is_one_node():
    assert SHIPPED["gb300"].devices_per_node == 72
    # 360 PFLOP/s of bf16 with sparsity for the rack
    assert 2 * 72 * peak(SHIPPED["gb300"].device, "bf16") == 360e15


def test_llama_3s_pods():
    levels = SHIPPED["h100-24k"].network.levels
    assert [level.nodes * 8 for level in levels] == [16, 3072]
    assert [level.oversubscription for level in levels] == [1, 7]


def test_a_precision_that_the_device_lacks_is_refused():
    with pytest.raises(UserError, match="V100 SXM2 16 GB has no bf16 arithmetic; it has float64, "):
        peak(SHIPPED["v100-16"].device, "bf16")
    with pytest.raises(UserError, match="has no fp4 arithmetic"):
        peak(SHIPPED["h200"].device, "fp4")


# -- what a plan counts on -----------------------------------------------------

SMALL = Cluster(
    name="small",
    device=Device("chip", 10.0, 100.0, Flops(float32=1000.0, bf16=2000.0)),
    devices_per_node=4,
    nodes=2,
    inside=Link("fast", 40.0, 0.5),
    between=Link("slow", 8.0, 2.0),
    network=Tree((Level(2, 1.0),)),
    host=Host(1.0, Link("pcie", 5.0, 0.1)),
    nics=4,
    efficiency=Efficiency(matmul=0.5, memory=0.25, inside=0.75, between=0.125),
    measured=(("device.flops.bf16", 1500.0), ("inside.latency", 0.7)),
)


def test_measured_replaces_nominal_and_the_stated_share_lowers_the_rest():
    counted = attained(SMALL)
    assert counted.device.flops == Flops(float32=500.0, bf16=1500.0)
    assert counted.device.bandwidth == 25.0
    assert counted.inside == Link("fast", 30.0, 0.7)
    assert counted.between == Link("slow", 1.0, 2.0)
    assert counted.device.memory == 10.0
    assert SMALL.device.flops.bf16 == 2000.0  # the nominal numbers stay where they were


@pytest.mark.parametrize("name", SHIPPED)
def test_counting_twice_changes_nothing(name):
    once = attained(SHIPPED[name])
    assert attained(once) == once


@pytest.mark.parametrize("name", SHIPPED)
def test_nothing_is_counted_on_that_was_not_promised(name):
    cluster, counted = SHIPPED[name], attained(SHIPPED[name])
    for key, share, value in expected(cluster):
        assert 0 < share <= 1
        assert value == pytest.approx(share * nominal(cluster, key))
        assert 0 < nominal(counted, key) <= nominal(cluster, key)


@pytest.mark.parametrize(
    ("name", "teraflops", "nominally"),
    [("a100-40", 271, 312), ("a100-80", 271, 312), ("h100", 794, 989), ("b200", 1745, 2250)],
)
def test_the_reached_rate_stands_beside_the_nominal_one(name, teraflops, nominally):
    assert peak(attained(SHIPPED[name]).device, "bf16") == teraflops * 1e12
    assert peak(SHIPPED[name].device, "bf16") == nominally * 1e12


def test_a100s_all_reduce_as_it_was_measured():
    """Eight ranks: 77 us and 224 GB/s, over the 14 messages of a ring."""
    inside = attained(SHIPPED["a100-80"]).inside
    assert inside.bandwidth == 224e9
    assert 14 * inside.latency == pytest.approx(77e-6)


def test_the_wires_of_a_grid_and_of_a_lone_node_are_the_same_before_and_after():
    for name in ("tpu-v4", "laptop-cpu"):
        counted = attained(SHIPPED[name])
        assert counted.inside == counted.between
    assert attained(SHIPPED["tpu-v5p"]).inside.bandwidth == 90e9
    assert attained(SHIPPED["laptop-cpu"]).alone
    assert not SHIPPED["h100"].alone


# -- sizes ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "nodes", "per_node"),
    [
        ("h100", 1, 8),
        ("h100x8", 1, 8),
        ("h100x64", 8, 8),
        ("h100x4", 1, 4),
        ("h100x1", 1, 1),
        ("v100-32x64", 4, 16),
        ("gb300x144", 2, 72),
        ("gb300x36", 1, 36),
        ("rack-10gbex8", 2, 4),
        ("laptop-cpux1", 1, 1),
        ("tpu-v4x128", 32, 4),
        ("tpu-v5ex1", 1, 1),
    ],
)
def test_other_sizes_are_whole_nodes_or_part_of_one(text, nodes, per_node):
    cluster = load_cluster(text)
    assert (cluster.nodes, cluster.devices_per_node) == (nodes, per_node)


def test_part_of_a_node_has_its_part_of_the_cards():
    assert load_cluster("h100x4").nics == 4
    assert load_cluster("p100x1").nics == 1


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("h100x12", "h100 has 8 devices in a node, so not 12; use h100x8 or h100x16"),
        ("h100x0", "so not 0; use h100x8"),
        ("gb300x100", "use gb300x72 or gb300x144"),
        ("laptop-cpux8", "laptop-cpu is one node of 2 devices, so not 8; use laptop-cpux2"),
        ("tpu-v4x100", "comes in slices of fixed sizes, so not 100; use tpu-v4x64 or tpu-v4x128"),
        ("tpu-v5ex512", "so not 512; use tpu-v5ex256"),
    ],
)
def test_a_size_that_does_not_exist_names_the_nearest(text, sentence):
    with pytest.raises(UserError) as refused:
        load_cluster(text)
    assert sentence in str(refused.value)


def test_a_file_of_ones_own_is_named_as_it_was_given(tmp_path):
    """`oursx12` was proposed for ours.toml, and is no cluster."""
    own = tmp_path / "ours.toml"
    own.write_text((FOLDER / "h100.toml").read_text())
    with pytest.raises(UserError, match=f"use {own}x8 or {own}x16"):
        load_cluster(f"{own}x12")


@pytest.mark.parametrize(
    ("text", "dims", "closed"),
    [
        ("tpu-v4", (4, 4, 4), (True, True, True)),
        ("tpu-v4x8", (2, 2, 2), (False, False, False)),
        ("tpu-v5px32", (2, 4, 4), (False, True, True)),
        ("tpu-v5px6144", (16, 16, 24), (True, True, True)),
        ("tpu-v5ex64", (8, 8), (False, False)),
        ("tpu-v5ex128", (8, 16), (False, True)),
        ("tpu-v5ex256", (16, 16), (True, True)),
    ],
)
def test_slices_of_a_pod_and_where_they_close(text, dims, closed):
    grid = load_cluster(text).network
    assert grid.dims == dims
    assert tuple(grid.closed(dim) for dim in range(len(dims))) == closed


def test_a_mesh_closes_nowhere_and_a_torus_everywhere():
    assert not any(Grid((4, 6), wraps=0).closed(dim) for dim in range(2))
    assert all(Grid((4, 6)).closed(dim) for dim in range(2))


def test_resizing_leaves_the_rest_alone():
    assert resized(resized(SMALL, 40), 8) == SMALL
