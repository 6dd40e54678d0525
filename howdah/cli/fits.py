"""Whether machines have room for a plan: what `howdah plan` and `howdah check` refuse."""

from functools import partial

from howdah.base.errors import UserError, several
from howdah.draw.tables import size_of
from howdah.machines.cluster import Cluster
from howdah.plan.plan import Plan
from howdah.plan.support import unsupported
from howdah.search.closest import closest
from howdah.search.search import home_of, shared
from howdah.sim.predict import Prediction, predict


def refuse_elsewhere(plan: Plan, machines: Cluster, cluster: str) -> None:
    """Raises UserError for a plan for which a cluster has too little memory, or no arithmetic.

    cluster  how its user names it
    """
    refuse_what_does_not_fit(predict(plan, machines), cluster)
    refuse_small_homes(plan, machines, cluster)


def refuse_what_does_not_fit(prediction: Prediction, cluster: str) -> None:
    """Raises UserError for a plan that needs more than a device has, with the nearest that fits."""
    plan, capacity = prediction.plan, prediction.capacity
    if capacity is None or prediction.peak <= capacity:
        return
    machines = prediction.cluster
    assert machines is not None  # it has the capacity
    better = closest(plan, capacity, lambda other: home_of(other, machines))
    way = f"'{better}' fits" if better else "nothing near fits: take more devices"
    asked = partial(unsupported, plan.shape)
    known = asked(plan.layout)  # the notes say this of the plan already
    reasons = [one for one in asked(better or plan.layout) if one not in known]
    if reasons:
        way += f" ({several(reasons)})"
    raise UserError(
        f"layout '{plan.layout}' needs {size_of(prediction.peak)} a device, and {cluster} has "
        f"{size_of(capacity)}; {way}"
    )


def refuse_small_homes(plan: Plan, machines: Cluster, cluster: str) -> None:
    """Raises UserError for a plan that keeps more off the device than a node has there."""
    if not (found := home_of(plan, machines)):
        return
    home, kept, there = found
    both = ", device and host in one memory" if home == "host" and shared(machines) else ""
    raise UserError(
        f"layout '{plan.layout}' keeps {size_of(kept)} on the {home} of a node{both}, and "
        f"{cluster} has {size_of(there)} there, {size_of(kept - there)} too little: use another "
        "home for a part, zero3, or more devices"
    )
