"""Cluster files: what may stand there, and one sentence for everything that may not."""

import pytest

from howdah.base.errors import UserError
from howdah.machines.cluster import LINKS, Grid, Level, Link, Tree
from howdah.machines.cluster_tables import parse_cluster

GOOD = """
name = "ours"

[device]
name = "Box"
memory = "24 GB"
bandwidth = "936 GB/s"
watts = "350 W"

[device.flops]
bf16 = "71 TFLOP/s"

[node]
devices = 4
count = 2

[inside]
link = "pcie4"

[between]
link = "10gbe"

[host]
memory = "128 GB"
link = "pcie4"
"""


def test_a_short_file_is_enough():
    cluster = parse_cluster(GOOD, file="ours.toml")
    assert (cluster.name, cluster.devices, cluster.nics) == ("ours", 8, 1)
    assert cluster.between == LINKS["10gbe"]
    assert cluster.network == Tree()
    assert (cluster.pue, cluster.carbon) == (1.1, 0.385)
    assert (cluster.device.price, cluster.rent, cluster.measured) == (None, None, ())


def changed(old, new):
    assert old in GOOD
    return GOOD.replace(old, new)


def network(text):
    return parse_cluster(f"{GOOD}\n[network]\n{text}", file="ours.toml").network


def test_trees():
    assert network('shape = "flat"') == Tree()
    assert network('shape = "spine-leaf"\nleaf = 16\noversubscription = 4') == Tree((Level(16, 4),))
    levels = "[{nodes = 2, oversubscription = 1}, {nodes = 8, oversubscription = 2.5}]"
    assert network(f'shape = "fat-tree"\nlevels = {levels}') == Tree((Level(2, 1), Level(8, 2.5)))


def test_grids():
    wires = changed('[inside]\nlink = "pcie4"\n', "")
    torus = parse_cluster(f'{wires}[network]\nshape = "torus"\ndims = [2, 4]', file="ours.toml")
    assert torus.network == Grid((2, 4), wraps=1)
    assert torus.inside == torus.between == LINKS["10gbe"]
    mesh = parse_cluster(f'{wires}[network]\nshape = "mesh"\ndims = [8]', file="ours.toml")
    assert mesh.network == Grid((8,), wraps=0)


def test_a_link_of_ones_own():
    own = 'link = "cable"\nbandwidth = "7 Gb/s"\nlatency = "9 us"'
    cluster = parse_cluster(changed('link = "10gbe"', own), file="ours.toml")
    assert cluster.between == Link("cable", 7e9 / 8, 9e-6)


def test_a_known_link_may_have_another_latency():
    cluster = parse_cluster(changed('"10gbe"', '"10gbe"\nlatency = "9 us"'), file="ours.toml")
    assert cluster.between == Link("10gbe", 10e9 / 8, 9e-6)


def test_one_node_needs_no_network():
    alone = changed('[between]\nlink = "10gbe"\n', "").replace("count = 2", "")
    assert parse_cluster(alone, file="ours.toml").alone


def test_measured_numbers_have_dotted_names():
    measured = '[measured]\nbetween.latency = "90 us"\ndevice.flops.bf16 = "60 TFLOP/s"'
    cluster = parse_cluster(GOOD + measured, file="ours.toml")
    assert cluster.measured == (("device.flops.bf16", 60e12), ("between.latency", 90e-6))


WRONG = [
    # missing and mistaken units
    (changed('"24 GB"', "24"), "device.memory is 24, which has no unit; write it like '80 GB'"),
    (changed('"24 GB"', '"24"'), "device.memory '24' has no unit"),
    (changed('"24 GB"', '"24 Gb"'), "device.memory '24 Gb': 'Gb' is no unit of bytes"),
    (changed('"936 GB/s"', '"936 GB"'), "device.bandwidth '936 GB': 'GB' counts bytes, but"),
    (changed('"71 TFLOP/s"', '"71 TFLOPS"'), "device.flops.bf16 '71 TFLOPS': 'TFLOPS' is no unit"),
    (changed('"350 W"', '"350 kg"'), "device.watts '350 kg': 'kg' is no unit of watts"),
    (f"pue = 0.9\n{GOOD}", "pue is 0.9; it must be at least 1"),
    (f"carbon = 0.3\n{GOOD}", "carbon is 0.3, which has no unit; write it like '0.385 kg/kWh'"),
    # what stands there twice and differs
    (
        changed('"pcie4"\n\n[b', '"nvlink4"\nbandwidth = "900 GB/s"\n\n[b'),
        "inside.bandwidth is 900 GB/s, but nvlink4 has 450 GB/s in one direction; drop it",
    ),
    (
        changed('"10gbe"', '"10gbe"\nnics = 4\nnode_bandwidth = "10 Gb/s"'),
        "between.node_bandwidth is 1.25 GB/s, but 4 x 10gbe are 5 GB/s; drop it",
    ),
    (changed('"350 W"', '"350 W"\nidle = "400 W"'), "device.idle is more than device.watts"),
    (changed('"350 W"', '"350 W"\nreserved = "30 GB"'), "device.reserved leaves nothing"),
    (
        f'{GOOD}[measured]\ndevice.flops.bf16 = "142 TFLOP/s"',
        "measured.device.flops.bf16 is 142 TFLOP/s, which device.flops.bf16 does not promise",
    ),
    (f'{GOOD}[measured]\ndevice.flops.fp8 = "1 TFLOP/s"', "device.flops.fp8 does not promise"),
    (
        changed('[inside]\nlink = "pcie4"', '[network]\nshape = "torus"\ndims = [4, 4]'),
        "network.dims 4 x 4 are 16 devices, but 2 nodes of 4 are 8",
    ),
    (
        changed(
            '[inside]\nlink = "pcie4"',
            '[network]\nshape = "torus"\ndims = [2, 4]\n[measured]\ninside.latency = "1 us"',
        ),
        "measured.inside.latency: in a torus or mesh measure between",
    ),
    (f'{GOOD}[network]\nshape = "torus"\ndims = [8]', "give [between], not [inside]"),
    # missing and unknown keys
    (changed('memory = "24 GB"\n', ""), "device.memory is missing; howdah measure finds mem"),
    (changed('name = "ours"', ""), "name is missing"),
    (changed("devices = 4\n", ""), "node.devices is missing"),
    (changed('[inside]\nlink = "pcie4"', ""), "[inside] is missing"),
    (changed('[between]\nlink = "10gbe"', ""), "[between] is missing, the link between the 2"),
    (changed('link = "10gbe"', 'bandwidth = "1 Gb/s"'), "between.link is missing"),
    (
        changed('"10gbe"', '"10gb"'),
        "between.bandwidth and latency are missing, and link '10gb'",
    ),
    (changed('"10gbe"', '"x"\nbandwidth = "1 GB/s"'), "between.latency is missing, and link 'x'"),
    (changed("watts", "wats"), "unknown key 'device.wats'; did you mean 'device.watts'?"),
    (changed('bf16 = "71 TFLOP/s"', ""), "device.flops gives no rate"),
    (f'speed = "1"\n{GOOD}', "unknown key 'speed'"),
    (f'{GOOD}[measured]\nbetween.width = "1 GB"', "unknown key 'measured.between.width'"),
    # wrong shapes and kinds
    (changed("devices = 4", "devices = 0"), "node.devices is 0; it must be at least 1"),
    (changed("devices = 4", "devices = true"), "node.devices is True; it must be a whole"),
    (changed('"Box"', "7"), "device.name is 7; it must be a text in quotes"),
    (f"host = 3\n{GOOD.partition('[host]')[0]}", "host is 3; it must be a table"),
    (f"{GOOD}[efficiency]\nmatmul = 1.2", "efficiency.matmul is 1.2; it must be at most 1"),
    (f'{GOOD}[network]\nshape = "ring"', "network.shape is 'ring'; it must be 'flat', 'spine-"),
    (f"{GOOD}[network]\nleaf = 4", "network.shape is missing"),
    (f'{GOOD}[network]\nshape = "flat"\nleaf = 4', "network.leaf says nothing about a flat"),
    (f'{GOOD}[network]\nshape = "spine-leaf"\nleaf = 4', "oversubscription is missing; a spine-"),
    (f'{GOOD}[network]\nshape = "fat-tree"', "network.levels is missing; a fat-tree"),
    (
        f'{GOOD}[network]\nshape = "fat-tree"\nlevels = [{{nodes = 2}}]',
        "network.levels[0].oversubscription is missing",
    ),
    (
        f'{GOOD}[network]\nshape = "fat-tree"\nlevels = [{{nodes = 4, oversubscription = 1}}, '
        "{nodes = 6, oversubscription = 1}]",
        "6 nodes are not several groups of 4",
    ),
    (
        f'{GOOD}[network]\nshape = "mesh"\ndims = [0, 2]',
        "network.dims[0] is 0; it must be at",
    ),
    (f'{GOOD}[network]\nshape = "mesh"', "network.dims is missing; a mesh network needs it"),
    ("name = ours", "is not TOML"),
    # bounds
    (changed("devices = 4", "devices = 9223372036854775807"), "it must be at most 1,048,576"),
    (changed("devices = 4", "devices = 1048576"), "are 2,097,152; at most 1,048,576 are planned"),
    (changed('memory = "24 GB"', 'memory = "0 GB"'), "device.memory is '0 GB'; it must be from 1e"),
    (changed('memory = "24 GB"', 'memory = "1e99 GB"'), "device.memory is '1e99 GB'; it must be"),
    (
        changed('"10gbe"', '"x"\nbandwidth = "0 B/s"\nlatency = "0 s"'),
        "between.bandwidth is '0 B/s'",
    ),
    (f"pue = inf\n{GOOD}", "pue is inf; it must be at most 1e+06"),
    (f"pue = nan\n{GOOD}", "pue is nan; it must be a number"),
    (
        changed('name = "ours"', f'name = "{"x" * 5000}"'),
        "it must be a text in quotes of at most 200",
    ),
    (changed('name = "ours"', r'name = "a\nb"'), "name is 'a\\nb'; it must be a text in quotes"),
    (f"a = {'[' * 50_000}", "is not TOML: its lists or tables are nested too deep"),
    (f"a = {'9' * 5000}", "is not TOML: a number has thousands of digits"),
    (
        f'{GOOD}[network]\nshape = "torus"\ndims = [1024, 1024]',
        "network: 1024 x 1024 are over 65,536 devices together, the most of a torus",
    ),
    (f'{GOOD}[network]\nshape = "torus"\ndims = {[1] * 33}', "it must be a list of 1 to 32"),
    (
        f'{GOOD}[network]\nshape = "torus"\ndims = [8]\nslices = [[-1]]',
        "network.slices[0][0] is -1",
    ),
    (
        f'{GOOD}[network]\nshape = "fat-tree"\nlevels = [{{nodes = 2, oversubscription = inf}}]',
        "network.levels[0].oversubscription is inf; it must be at most 1e+06",
    ),
    (
        f"{GOOD}[measured]\n{'a.' * 900}b = 1",
        "unknown key 'measured.a'; known are: between, device, host, inside",
    ),
    (f'{GOOD}"{"x" * 5000}" = 1', "unknown key 'host.xxx"),
]


@pytest.mark.parametrize(("text", "sentence"), WRONG, ids=lambda value: value[-40:])
def test_what_is_wrong_names_the_file_and_the_key(text, sentence):
    with pytest.raises(UserError) as refused:
        parse_cluster(text, file="ours.toml")
    assert str(refused.value).startswith("ours.toml")
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 500


def test_everything_that_is_wrong_is_told_at_once():
    text = changed('"24 GB"', '"24"').replace("devices = 4", "devices = 0").replace("watts", "wats")
    with pytest.raises(UserError) as refused:
        parse_cluster(text.replace('name = "ours"', "pue = 0"), file="ours.toml")
    assert str(refused.value) == (
        "ours.toml: unknown key 'device.wats'; did you mean 'device.watts'?; "
        "device.memory '24' has no unit; write it like '80 GB'; "
        "node.devices is 0; it must be at least 1; "
        "pue is 0; it must be at least 1; "
        "name is missing"
    )


def test_every_contradiction_is_told_at_once():
    text = changed('"350 W"', '"350 W"\nidle = "400 W"').replace('link = "10gbe"', 'link = "10gb"')
    with pytest.raises(UserError) as refused:
        parse_cluster(f'{text}[network]\nshape = "flat"\nleaf = 4', file="ours.toml")
    told = "device.idle", "between.bandwidth and latency", "network.leaf says nothing"
    assert [sentence in str(refused.value) for sentence in told] == [True] * 3


def test_what_is_missing_is_told_with_what_contradicts():
    """An absent table once hid the keys that it must have, and every contradiction."""
    text = """
inside = 3
[device]
name = "x"
memroy = "24 GB"
[node]
devices = 2
count = 3
[network]
shape = "spine-leaf"
leaf = 3
"""
    with pytest.raises(UserError) as refused:
        parse_cluster(text, file="ours.toml")
    assert str(refused.value).split("; ") == [
        "ours.toml: unknown key 'device.memroy'",
        "did you mean 'device.memory'?",
        "device.memory, bandwidth, flops are missing",
        "inside is 3",
        "it must be a table",
        "name, host.link, host.memory are missing",
        "network.oversubscription is missing",
        "a spine-leaf network needs it",
        "[between] is missing, the link between the 3 nodes",
        "howdah measure finds memory, rates and latencies of a machine that you have, and writes "
        "such a file",
    ]


def test_an_empty_file_is_told_all_that_it_must_say():
    with pytest.raises(UserError, match="toml: name, device") as refused:
        parse_cluster("", file="ours.toml")
    told, _ = str(refused.value).split("; howdah measure")
    assert told.endswith(
        "device.bandwidth, device.flops, node.devices, host.link, host.memory are missing; "
        "[inside] is missing, the link between the devices of a node"
    )


@pytest.mark.parametrize(
    ("old", "new", "more"),
    [
        ('[inside]\nlink = "pcie4"\n', "", '[network]\nshape = "torus"\ndims = [2, 4]'),
        ("", "", '[network]\nshape = "mesh"\ndims = [2, 4]'),
    ],
)
def test_a_grid_is_not_held_against_a_node_that_is_wrong(old, new, more):
    text = changed("devices = 4", "devices = 0").replace(old, new)
    with pytest.raises(UserError) as refused:
        parse_cluster(f"{text}{more}", file="ours.toml")
    assert "nodes of" not in str(refused.value)
    assert ("give [between], not [inside]" in str(refused.value)) is (not old)


def test_nothing_is_said_of_a_table_that_stands_in():
    text = changed("devices = 4", "devices = 0").replace('link = "10gbe"', "link = 3")
    with pytest.raises(UserError) as refused:
        parse_cluster(text, file="ours.toml")
    assert str(refused.value) == (
        "ours.toml: node.devices is 0; it must be at least 1; between.link is 3; "
        "it must be a text in quotes"
    )
