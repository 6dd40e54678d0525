"""Cluster files: finds a TOML file, and reads it into a `Cluster`.

h100            a shipped cluster: the file clusters/h100.toml next to this file
h100x64         the same cluster with 64 devices: 8 nodes
rooms/ours.toml a file of the user; x64 may follow it too
here, herex4    this machine as `howdah measure` found it, with 4 ranks at once: here-4.toml in the
                user's folder of measured clusters
"""

import re
from dataclasses import replace
from pathlib import Path

from howdah.base.errors import UserError, named, nearest, shown
from howdah.base.files import read_text
from howdah.machines.cluster import Cluster, resized

FOLDER = Path(__file__).parent / "clusters"
LARGEST_FILE = 256 << 10  # bytes
HERE = "here"  # the name of this machine
CLUSTERS = "clusters"  # the folder of a user's cache that has it


def cluster_names() -> list[str]:
    """The names of the clusters that are shipped with howdah, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load_cluster(text: str, *, devices: int | None = None, own: Path | None = None) -> Cluster:
    """Loads the cluster that `text` names, with `devices` devices if that is given.

    own  the user's folder of measured clusters

    Raises UserError for an unknown name, for an unreadable or wrong file, for a size in which the
    cluster does not exist, and for two sizes that disagree.
    """
    from howdah.machines.cluster_tables import parse_cluster  # most commands need none

    name, size = split_size(text)
    if devices is not None and size is not None and devices != size:
        raise UserError(f"cluster {shown(text)} has {size} devices, but {devices} are asked for")
    wanted = devices if devices is not None else size
    if name == HERE and own:
        name, wanted = str(_measured(own, wanted)), None
    if name.lower() in cluster_names():
        name = name.lower()
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    if not name.endswith(".toml") and name not in cluster_names():
        raise UserError(f"cluster {shown(text)} is unknown{_meant(name, text)}")
    try:
        content = read_text(path, LARGEST_FILE)
    except OSError as error:
        raise UserError(f"cluster file {named(name)} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"cluster file {named(name)} is not UTF-8; give a TOML file") from None
    cluster = parse_cluster(content, file=named(path.name))
    if cluster.profile:
        cluster = replace(cluster, profile=str(path.parent / cluster.profile))
    return cluster if wanted is None else resized(cluster, wanted, called=name)


def measured_file(own: Path, ranks: int) -> Path:
    """The cluster file of this machine with so many ranks at once, whether it is there or not."""
    return own / f"{HERE}-{ranks}.toml"


def _measured(own: Path, ranks: int | None) -> Path:
    """The file of this machine; without a number of ranks, that of one rank for each core."""
    path = own / f"{HERE}.toml" if ranks is None else measured_file(own, ranks)
    if path.is_file():
        return path
    if not (own / f"{HERE}.toml").is_file():
        raise UserError(
            f"this machine was not measured; run howdah measure, which makes the cluster {HERE}"
        )
    raise UserError(
        f"this machine was not measured with {ranks} ranks at once; howdah measure --ranks {ranks} "
        "does it"
    )


def _meant(name: str, text: str) -> str:
    """The clusters whose names begin with `name` (a100), else those most like it."""
    if (turned := re.fullmatch(r"(\d+)x(.+)", name)) and turned[2] in cluster_names():
        return f"; write {turned[2]}x{turned[1]}"
    name = name.lower()
    for known in cluster_names():
        if known.replace("-", "") == re.sub(r"[-_ ]", "", text.lower()):
            return f"; did you mean {known!r}?"
    begin = [repr(known) for known in cluster_names() if name and known.startswith(name)]
    return f"; did you mean {' or '.join(begin)}?" if begin else nearest(name, cluster_names())


def split_size(text: str) -> tuple[str, int | None]:
    """The name and the size in `text`: a100-40x16 is 16 devices of a100-40. None without size."""
    match = re.fullmatch(r"(.+)x(\d{1,9})", text)
    return (match[1], int(match[2])) if match else (text, None)
