"""Gradient sums of a pipeline rank: over the replicas, stage by stage, and over the two stages that
hold a tied embedding.

    program    … 0B1 0F3 0B2     0B3
    stage 0                      [buckets][tied] └ wait, tie, update
                                  ^ armed before the stage's last gradients: buckets start when full

Each stage has a reducer of its own, because stages finish at different times, and the stages of one
rank must not wait for each other. When shares are accumulated, every micro-batch is reduced as soon
as its backward through the stage has ended.

A tied embedding whose two stages are on two ranks also has a reducer of its own. Each of these
ranks gets a share of the sum over its replicas, the shares of both stages are added, and, where
weights are updated whole, all replicas gather the result: two of the three messages carry a share.

    stage 0   replicas 0 1    reduce-scatter │ sum with stage 3, share by share │ all-gather
    stage 3   replicas 0 1    reduce-scatter │                                  │ all-gather
"""

from concurrent.futures import Future

from torch import Tensor

from howdah.comm.group import DONE, Group
from howdah.parallel.data import Reducer, Replicas, whole_gradient, whole_gradients
from howdah.parallel.flat_params import FlatUnit
from howdah.parallel.mesh import Mesh
from howdah.parallel.part_sums import PartSums, sum_parts
from howdah.parallel.zero import ShareReducer, Window
from howdah.plan.buckets import summed_together
from howdah.plan.mesh_axes import axis
from howdah.plan.plan import Plan
from howdah.plan.program import tied_stages

Units = dict[str, FlatUnit]
Sums = Reducer | ShareReducer | PartSums


class StageSums:
    """Sums the gradients of this rank's stages."""

    def __init__(self, plan: Plan, mesh: Mesh, units: Units, window: Window | None) -> None:
        self._plan, self._mesh, self._units = plan, mesh, units
        self._replicas = Replicas(mesh.shard, mesh.across)
        self._window, self._each = window, window is not None
        self._by_stage: dict[int, list[Sums]] = {}
        self._of: dict[str, Sums] = {}
        self._views = {} if self._each else whole_gradients(units)
        self._tie = self._join_tie()
        for stage, groups in summed_together(plan, mesh.rank).items():
            some = [{buffer.unit: units[buffer.unit] for buffer in group} for group in groups]
            reducers = [self._reducer(own, tied=bool(self._tie) and "tied" in own) for own in some]
            self._by_stage[stage] = [reducer for reducer in reducers if reducer]

    @property
    def exposed(self) -> float:
        """Seconds that this rank has waited for sums, over the whole run."""
        return sum(reducer.exposed for some in self._by_stage.values() for reducer in some)

    # -- for the store of weights

    def target(self, name: str) -> Tensor:
        """The tensor to which the gradient of `name` is added."""
        return self._of[name].target(name) if self._each else self._views[name]

    def ready(self, name: str) -> None:
        """Called when the gradient of `name` is complete for all forwards so far."""
        if name in self._of:
            self._of[name].ready(name)

    # -- for the executor

    def arm(self, stage: int) -> None:
        """Announces the last gradients of `stage` in this step."""
        for reducer in self._by_stage.get(stage, ()):
            reducer.arm()

    def passed(self, stage: int) -> None:
        """Called when a micro-batch, not the last, has added all of its gradients to `stage`."""
        if self._each:
            for reducer in self._by_stage.get(stage, ()):
                reducer.finish()

    def finish(self, stage: int) -> None:
        """Waits until the gradients of `stage` are summed over the replicas."""
        for reducer in self._by_stage.get(stage, ()):
            reducer.finish()

    def tie(self) -> Future[None]:
        """Starts to sum the tied embedding's gradients over its two stages, if they are on two
        ranks.
        """
        return self._tie.all_reduce([self._tied_share()], async_op=True) if self._tie else DONE

    def tied(self) -> None:
        """Called when the sum of `tie` is done. Where replicas update the whole embedding, each
        gathers all of its gradient.
        """
        if self._plan.layout.zero == 0 and self._mesh.shard.size > 1:
            self._mesh.shard.all_gather([whole_gradient(self._units["tied"])])

    # -- how they are made

    def _reducer(self, units: Units, *, tied: bool) -> Sums | None:
        """The sums for some units; None where there is only one replica and no tp."""
        copies: Reducer | ShareReducer | None = None
        if self._window:
            copies = ShareReducer(units, self._replicas, self._window)
        elif not self._replicas.alone:
            scatter = tied or self._plan.layout.zero > 0
            copies = Reducer(units, self._replicas, scatter=scatter)
        reducer: Sums | None = copies
        if self._plan.layout.tp > 1:
            reducer = sum_parts(self._plan, self._mesh, units, copies)
        if reducer:
            names = (name for unit in units.values() for name in unit.buffer.names)
            self._of.update(dict.fromkeys(names, reducer))
        return reducer

    def _join_tie(self) -> Group | None:
        """The group of the two ranks that hold this replica's tied embedding; None on other
        ranks.
        """
        places = self._plan.ranks_of_unit["tied"] if tied_stages(self._plan) else ()
        if self._mesh.index_of("pp") not in places:
            return None
        ranks = axis(self._plan.layout, "pp").group(self._mesh.rank)
        return self._mesh.join([ranks[place] for place in places], label="pp")

    def _tied_share(self) -> Tensor:
        unit = self._units["tied"]
        if unit.gradients is None or self._plan.layout.zero > 0:
            return unit.summed
        return self._mesh.shard.own_shard(unit.gradients)
