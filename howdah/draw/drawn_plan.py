"""A plan as one of three pictures, in text or SVG: its memory, its mesh, its traffic."""

from typing import Literal

from howdah.draw.memory import draw_memory
from howdah.draw.memory_svg import draw_memory_svg
from howdah.draw.mesh import draw_mesh, stage_labels
from howdah.draw.mesh_svg import draw_mesh_svg
from howdah.draw.traffic import draw_traffic
from howdah.draw.traffic_svg import draw_traffic_svg
from howdah.sim.predict import Prediction

Planned = Literal["memory", "mesh", "traffic"]
NODE = 8  # devices of a node, where no cluster says it


def draw_plan(what: Planned, prediction: Prediction, name: str, *, svg: bool) -> str:
    """The picture `what` of a plan, headed by its `name` and layout."""
    plan, cluster = prediction.plan, prediction.cluster
    title = f"{name}: {plan.layout}"
    if what == "memory":
        stages = dict(zip(stage_labels(plan), prediction.memory, strict=True))
        return (draw_memory_svg if svg else draw_memory)(stages, prediction.capacity, title=title)
    if what == "mesh":
        node = cluster.devices_per_node if cluster else NODE
        return (draw_mesh_svg if svg else draw_mesh)(plan, node)
    most = max(prediction.traffic, key=lambda sent: sum(sent.values()))
    return (draw_traffic_svg if svg else draw_traffic)(most, title=title)
