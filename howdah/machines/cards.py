"""The accelerator of a shipped cluster that torch calls by a name: one table for plans and runs.

Each cluster file lists the names of its device in `device.cuda_names`, as `get_device_name` of
torch spells them. Only an equal name counts. "NVIDIA H100 PCIe" has 756 TFLOP/s where "NVIDIA H100
80GB HBM3" has 989, "NVIDIA GB200" contains "B200", and a slice of a card (MIG) has the card's name
with words added.
"""

from howdah.base.files import read_text
from howdah.machines.cluster import Cluster, Device
from howdah.machines.cluster_file import FOLDER, LARGEST_FILE, cluster_names, load_cluster


def device_named(name: str) -> Device | None:
    """The device that torch calls `name`; None if no shipped cluster has it."""
    cluster = cluster_of_card(name)
    return cluster.device if cluster else None


def cluster_of_card(name: str) -> Cluster | None:
    """The first shipped cluster, by name, with the device that torch calls `name`; None if there
    is none.
    """
    for known in cluster_names():
        if f'"{name}"' in read_text(FOLDER / f"{known}.toml", LARGEST_FILE):  # parsed only then
            cluster = load_cluster(known)
            if name in cluster.device.cuda_names:
                return cluster
    return None
