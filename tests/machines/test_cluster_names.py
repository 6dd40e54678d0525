"""Names and paths of clusters, and the page that lists them."""

import os
import re
from pathlib import Path

import numpy as np
import pytest
from test_cluster_file import GOOD, changed

from howdah.base.errors import UserError
from howdah.machines.cluster import LINKS, Level, Tree
from howdah.machines.cluster_file import FOLDER, cluster_names, load_cluster
from howdah.machines.cluster_tables import parse_cluster
from howdah.machines.network import path

# -- names and paths -----------------------------------------------------------


def test_names_come_from_the_folder():
    assert cluster_names() == sorted(path.stem for path in FOLDER.iterdir())


@pytest.mark.parametrize(
    ("text", "nearest"),
    [("h10", "h100"), ("H10", "h100"), ("a100-8", "a100-80"), ("v100-33", "v100-32")],
)
def test_an_unknown_name_is_answered_with_the_nearest(text, nearest):
    with pytest.raises(UserError, match=f"cluster '{text}' is unknown; did you mean '{nearest}"):
        load_cluster(text)


def test_an_unknown_name_with_a_size_keeps_the_suggestion():
    with pytest.raises(UserError, match="'h10x64' is unknown; did you mean 'h100'"):
        load_cluster("h10x64")


@pytest.mark.parametrize("name", ["rtx4090", "RTX 4090", "rtx_4090"])
def test_a_name_without_its_hyphen_is_understood(name):
    """Its end was read as a size: 4,090 devices of a cluster called rt."""
    with pytest.raises(UserError, match="is unknown; did you mean 'rtx-4090'"):
        load_cluster(name)


def test_a_name_like_none_lists_the_nearest():
    with pytest.raises(UserError, match="of 29 that are known the nearest are: v100-32"):
        load_cluster("zzz")


def test_a_price_and_a_rent_that_disagree_are_refused():
    priced = f'price_per_hour = "8 USD/h"\n{GOOD}'
    cluster = parse_cluster(priced, file="ours.toml")
    each = 8 / cluster.devices_per_node
    assert cluster.rent_of_device == each
    assert parse_cluster(f'rent = "{each} USD/h"\n{priced}', file="a").rent_of_device == each
    with pytest.raises(UserError, match="price_per_hour is 8 USD/h of a node, but"):
        parse_cluster(f'rent = "{each + 1} USD/h"\n{priced}', file="ours.toml")


def test_a_file_of_ones_own(tmp_path):
    path = tmp_path / "ours.toml"
    path.write_text(GOOD, encoding="utf-8")
    assert load_cluster(str(path)).devices == 8
    assert load_cluster(f"{path}x16").nodes == 4
    assert load_cluster(str(path), devices=12).nodes == 3


def test_a_wrong_file_is_named(tmp_path):
    path = tmp_path / "ours.toml"
    path.write_text(changed('"24 GB"', '"24"'), encoding="utf-8")
    with pytest.raises(UserError, match=r"^ours\.toml: device\.memory"):
        load_cluster(str(path))


def test_sizes_of_no_machine_are_refused():
    with pytest.raises(
        UserError, match="h100 with 99,999,992 devices is too large; at most 1,048,5"
    ):
        load_cluster("h100x99999992")


def test_a_file_of_another_kind(tmp_path):
    os.mkfifo(tmp_path / "pipe.toml")
    (tmp_path / "large.toml").write_text("#" * 300_000)
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    for name, reason in {
        "pipe": "cannot be read: it is a pipe",
        "large": "cannot be read: it has more than the 262,144 bytes",
        "binary": "is not UTF-8; give a TOML file",
    }.items():
        with pytest.raises(UserError, match=f"{name}.toml {reason}"):
            load_cluster(str(tmp_path / f"{name}.toml"))


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match=r"none\.toml cannot be read"):
        load_cluster(str(tmp_path / "none.toml"))


def test_two_sizes_that_disagree():
    assert load_cluster("h100x16", devices=16).nodes == 2
    with pytest.raises(UserError, match="has 16 devices, but 8 are asked for"):
        load_cluster("h100x16", devices=8)


@pytest.mark.parametrize("name", cluster_names())
def test_every_shipped_file_gives_its_sources(name):
    text = (FOLDER / f"{name}.toml").read_text(encoding="utf-8")
    assert text.count("#") >= 4


def test_a_grid_of_as_many_dims_as_numpy_has_can_be_priced():
    """A torus of 65 to 100 dims was once read, and then ended in a traceback of numpy."""
    wires = changed('[inside]\nlink = "pcie4"\n', "")
    dims = [2, 4] + [1] * 30
    text = f'{wires}[network]\nshape = "torus"\ndims = {dims}'
    cluster = parse_cluster(text, file="ours.toml")
    assert path(cluster, np.arange(8)[None], pattern="all").link.bandwidth > 0


# -- the page ------------------------------------------------------------------

PAGE = (Path(__file__).parents[2] / "docs" / "clusters.md").read_text(encoding="utf-8")


def test_the_least_file_of_the_page_is_sound_and_says_the_least():
    example = PAGE.split("```toml\n")[1].split("```")[0]
    cluster = parse_cluster(example, file="ours.toml")
    assert (cluster.devices, cluster.nics, cluster.device.reserved) == (2, 1, 0)
    lines = [line for line in example.splitlines() if line]
    assert len(lines) <= 10
    for line in lines:
        with pytest.raises(UserError):
            parse_cluster(example.replace(line, ""), file="ours.toml")


def test_the_file_of_the_page_is_sound():
    example = PAGE.split("```toml\n")[2].split("```")[0]
    cluster = parse_cluster(example, file="ours.toml")
    assert (cluster.devices, cluster.nics, cluster.network) == (48, 2, Tree((Level(6, 3),)))


def test_the_page_names_every_cluster_with_its_devices():
    rows = [
        line.split("|")[1:3] for line in PAGE.splitlines() if re.match(r"\| `[a-z0-9.-]+`", line)
    ]
    sizes = {name: size.strip() for names, size in rows for name in re.findall(r"`(.+?)`", names)}
    for name in cluster_names():
        assert sizes[name] == str(load_cluster(name).devices)


def test_the_page_names_every_known_link():
    assert all(f"`{name}`" in PAGE for name in LINKS if name[-1] not in "2345")


def test_the_number_comes_last():
    with pytest.raises(UserError, match="cluster '16xh100' is unknown; write h100x16"):
        load_cluster("16xh100")


def test_a_name_is_known_in_any_case():
    assert load_cluster("H100x16") == load_cluster("h100x16")
