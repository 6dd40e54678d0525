"""Gradient sums of a pipeline's rank: over the replicas stage by stage, and over the two stages
that hold one embedding.

    program    … 0B1 0F3 0B2     0B3
    stage 0                      [buckets][tied] └ wait, tie, update
                                  ^ armed before the stage's last gradients: they start as they come

Each stage has a reducer of its own, for stages finish at different times, and those of a rank
that has several must not wait for each other. Where shares add up, every micro-batch is reduced
as soon as the stage has gone through with it.

A tied embedding whose two stages live on two ranks has a reducer of its own too. Each rank takes
a share of the sum over its replicas, the shares of both stages are added, and, where weights are
updated whole, all replicas get the result: two of the three messages carry a share.

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
    """Sums what the stages of this rank add to their gradients."""

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
        """Where the gradient of `name` is added."""
        return self._of[name].target(name) if self._each else self._views[name]

    def ready(self, name: str) -> None:
        """The gradient of `name` is complete, for all that has gone forward so far."""
        if name in self._of:
            self._of[name].ready(name)

    # -- for the executor

    def arm(self, stage: int) -> None:
        """The next gradients of `stage` are its last in this step."""
        for reducer in self._by_stage.get(stage, ()):
            reducer.arm()

    def passed(self, stage: int) -> None:
        """A micro-batch, not the last, has given `stage` all of its gradients."""
        if self._each:
            for reducer in self._by_stage.get(stage, ()):
                reducer.finish()

    def finish(self, stage: int) -> None:
        """The gradients of `stage` are summed over the replicas when this returns."""
        for reducer in self._by_stage.get(stage, ()):
            reducer.finish()

    def tie(self) -> Future[None]:
        """Starts to sum the embedding's gradients over its two stages."""
        return self._tie.all_reduce([self._tied_share()], async_op=True) if self._tie else DONE

    def tied(self) -> None:
        """They are summed: every replica that updates all of the embedding gets all of them."""
        if self._plan.layout.zero == 0 and self._mesh.shard.size > 1:
            self._mesh.shard.all_gather([whole_gradient(self._units["tied"])])

    # -- how they are made

    def _reducer(self, units: Units, *, tied: bool) -> Sums | None:
        """None where there is nobody to sum with."""
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
        """The two ranks that hold the embedding of this rank's replica, if it is one of them."""
        places = self._plan.ranks_of_unit["tied"] if tied_stages(self._plan) else ()
        if self._mesh.place("pp") not in places:
            return None
        ranks = axis(self._plan.layout, "pp").group(self._mesh.rank)
        return self._mesh.join([ranks[place] for place in places], label="pp")

    def _tied_share(self) -> Tensor:
        unit = self._units["tied"]
        if unit.gradients is None or self._plan.layout.zero > 0:
            return unit.summed
        return self._mesh.shard.own_shard(unit.gradients)
