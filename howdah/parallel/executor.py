"""The executor: runs the program of a step on one rank, of one pipeline stage or of several.

    program     receive 0F1 · wait 0F0 · 1F0 · send 1F0 · wait 0F1 · 1F1 · …  · reduce · update
    values      received or computed here, input of a later action        activations, gradients
    held        what a forward keeps for its backward: its input and the graph
    late        weight gradients that an I action has deferred to its W action

The program contains all decisions (`plan/schedule/lowering.py`); here each verb is one small
function. Without pp, the whole model is one stage, and nothing is sent. A stage's forward is a
plain autograd graph from its inputs, which are leaves, to its outputs. Its backward starts from the
gradients that the next stage sends. Then the leaves have the gradients for the stage before:

    F    leaves(values) → outputs; held: leaves and edges of the graph; the outputs are sent on
    B    backward(edges, gradients) → the leaves' gradients are sent back; the entry is freed
    I    as B, but the store defers what it would add to weight gradients
    W    adds what the store has deferred

A receive is posted before its value is needed, and waits on a thread of its own. So `receive 2F0 ·
compute 0F0 · send 0F0` on one rank, whose 2F0 is computed elsewhere from that 0F0, does not
deadlock.

Gradients are summed over ranks while a stage's last backward pass runs (`sums.py`). The update
needs the norm of the full gradient, so the training step does it.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from howdah.comm.handle import Handle
from howdah.model.moe import Balancing
from howdah.model.transformer import Transformer
from howdah.parallel.context_counts import sequences_of
from howdah.parallel.flat_params import DTYPES
from howdah.parallel.homes import Homes
from howdah.parallel.mesh import Mesh
from howdah.parallel.saved_homes import Shelf
from howdah.parallel.served import PulledWeights
from howdah.parallel.stage_links import StageLinks, directions_of
from howdah.parallel.stages import Boundary, Given, boundary, run_stage
from howdah.parallel.sums import GradientSums
from howdah.parallel.weight_store import UnitWeightStore
from howdah.parallel.zero import UpdatedWeights
from howdah.parallel.zero3 import ShardedWeights
from howdah.plan.batch import MASKED
from howdah.plan.gather_order import units_at
from howdah.plan.plan import Plan
from howdah.plan.program import forward_only, program_of, schedule_of, stage_parts
from howdah.plan.schedule.actions import Action, Kind, Value, makes
from howdah.plan.schedule.lowering import Instruction, Verb, lower
from howdah.shapes.part import Part

# summed, of hidden states [b, s, h] and labels [b, s]; and the number that it will be divided by
Loss = Callable[[Tensor, Tensor, float], Tensor]
GRADIENTS = (Kind.BACKWARD, Kind.WEIGHT)  # actions that add to the gradients of weights


class Held(NamedTuple):
    """What a forward keeps for its backward.

    inputs  the leaves that it started from; none at the first stage
    ends    the edges of the graph at its outputs
    uses    how often it used each weight
    """

    inputs: Boundary
    ends: Mapping[str, GradientEdge]
    uses: Counter[str]


NOTHING = Held({}, {}, Counter())  # of a stage without a backward pass


class DeferredGrads(NamedTuple):
    """What an I action leaves for its W action.

    queue  additions to the gradients of weights
    uses   how often each weight was used
    """

    queue: list[Callable[[], None]]
    uses: Counter[str]


class Moving(NamedTuple):
    """A message that is sent or received."""

    handles: list[Handle]
    tensors: Boundary


class Executor:
    """Runs the stages of a rank, step after step.

    model     the parts of the model that this rank has
    store     has the weights of own operations; None where they are parameters of the model
    gatherer  brings updated weights from other ranks; None where nothing is gathered
    sums      sums the gradients over ranks
    packed    how many micro-batches of training had rows of several documents, and how many not
    homes     of what is not on the device
    shelf     has the activations of blocks that are not kept on the device
    parts     the parts of each stage; a parameter server has none
    loads     by name of a block with experts, what its router did in the last pass of training
    sequences  how the tokens of this rank lie in their sequences
    peak      the most pairs (stage, micro-batch) that it held at one time in the last pass
    """

    def __init__(  # noqa: PLR0913 (what a rank consists of, all by keyword)
        self,
        plan: Plan,
        mesh: Mesh,
        *,
        model: Transformer,
        store: UnitWeightStore | None,
        gatherer: UpdatedWeights | ShardedWeights | PulledWeights | None,
        sums: GradientSums,
        homes: Homes | None = None,
        shelf: Shelf | None = None,
    ) -> None:
        self.plan, self.mesh, self.model = plan, mesh, model
        self.homes, self.shelf = homes, shelf
        self.store, self.gatherer, self.sums = store, gatherer, sums
        self.links = StageLinks(mesh, directions_of(schedule_of(plan)))
        self.parts = {} if mesh.serves else stage_parts(plan, mesh.index_of("pp"))
        self._units = {part: units_at(plan, part) for some in self.parts.values() for part in some}
        self._programs: dict[tuple[int, bool], Sequence[Instruction]] = {}
        self.loads: dict[str, Tensor] = {}
        self.packed: Counter[bool] = Counter()
        self.sequences = sequences_of(plan, mesh)

    def train(self, given: Sequence[Given], loss: Loss, *, tokens: float) -> Tensor:
        """Computes the gradients of all micro-batches of a step, and sums them over the ranks.

        Returns the summed loss on the last stage, 0 on others: a scalar on the device. `tokens`
        divides the gradients.
        """
        if self.mesh.serves:
            return self._serve(len(given))
        work = StepRun(self, given, loss, tokens=max(tokens, 1.0))
        work.run(self._program(len(given), train=True))
        self.loads = work.loads
        return work.total

    def evaluate(self, given: Sequence[Given], loss: Loss) -> Tensor:
        """The summed loss of some micro-batches on the last stage, 0 on others: a scalar on the
        device. No gradients.
        """
        if self.mesh.serves:
            return torch.zeros((), device=self.mesh.device)
        work = StepRun(self, given, loss, tokens=1.0, trains=False)
        work.run(self._program(len(given), train=False))
        return work.total

    def _serve(self, micros: int) -> Tensor:
        """Sums what the workers push in a step, in the order in which their backward passes do."""
        with self.mesh.counters.recorder.span(
            Instruction(Verb.REDUCE, Action(Kind.BACKWARD, 0, micros - 1))
        ):
            self.sums.order.arm(0)
            self.sums.order.finish(0)
        if self.gatherer:
            self.gatherer.wait()  # an update may change weights once nobody pulls them
        return torch.zeros((), device=self.mesh.device)

    def alone(self, stage: int, given: Given, loss: Loss) -> Boundary:
        """The outputs of one of this rank's stages, run by itself for a measurement; its inputs are
        zeros.
        """
        work = StepRun(self, [given], loss, tokens=1.0)
        if stage > 0:
            before = self.empty(stage - 1, given, torch.zeros)
            work.values[Value("activation", stage - 1, 0)] = before
        return work.outputs(Action(Kind.FORWARD, stage, 0))[1]

    def balancing(self, given: Given, tokens: float) -> Balancing | None:
        """What training asks of the routers in one micro-batch; None for a dense model."""
        if self.plan.shape.experts is None:
            return None
        rows = (given.labels != MASKED).sum(-1) if given.labelled is None else given.labelled
        return Balancing(self.plan.method.routing, rows, tokens, sequences=self.sequences)

    def empty(
        self, stage: int, given: Given, make: Callable[..., Tensor] = torch.empty
    ) -> Boundary:
        """Tensors for the boundary between a stage and the next."""
        shapes = boundary(self.plan, self.mesh.rank, stage, given)
        dtype, device = DTYPES[self.plan.method.precision], self.mesh.device
        return {name: make(size, dtype=dtype, device=device) for name, size in shapes.items()}

    def await_weights(self, part: Part) -> None:
        """Waits until the weights of a part are those of the last update."""
        if self.homes and self._units[part]:
            self.homes.settle(*self._units[part])
        if self.gatherer and self._units[part]:
            self.gatherer.wait(*self._units[part])

    def _program(self, micros: int, *, train: bool) -> Sequence[Instruction]:
        """The program of this rank, made once for each number of micro-batches."""
        if (micros, train) not in self._programs:
            lowered = (
                program_of(self.plan, micros)
                if train
                else lower(forward_only(schedule_of(self.plan, micros)))
            )
            self._programs[micros, train] = lowered.programs[self.mesh.index_of("pp")]
        return self._programs[micros, train]


class StepRun:
    """One run of a program: the gradients of a step, or an evaluation.

    total  the summed loss of the micro-batches so far; on ranks other than that of the last stage
           the losses of their routers alone
    loads  by name of a block with experts, [E + 1]: tokens of each, and how many were dropped
    """

    def __init__(
        self,
        executor: Executor,
        given: Sequence[Given],
        loss: Loss,
        *,
        tokens: float,
        trains: bool = True,
    ) -> None:
        self.executor, self.given, self.loss, self.tokens = executor, given, loss, tokens
        self.trains, self.loads = trains, dict[str, Tensor]()
        self.recorder = executor.mesh.counters.recorder
        self.total = torch.zeros((), device=executor.mesh.device)
        self.values: dict[Value, Boundary] = {}
        self.held: dict[tuple[int, int], Held] = {}
        self.late: dict[tuple[int, int], DeferredGrads] = {}
        self.moving: dict[tuple[Verb, Action], Moving] = {}
        self.last: dict[int, Action] = {}  # by stage: the action that completes its gradients

    def run(self, program: Sequence[Instruction]) -> None:
        """Executes the instructions, one after the other."""
        for instruction in program:
            if instruction.verb is Verb.COMPUTE and instruction.action.kind in GRADIENTS:
                self.last[instruction.action.stage] = instruction.action
        for instruction in program:
            VERBS[instruction.verb](self, instruction)
        left = [*self.values, *self.held, *self.late, *self.moving]
        assert not left, f"left over at the end of the program: {left}"

    # -- computing

    def compute(self, instruction: Instruction) -> None:
        action = instruction.action
        if self.last.get(action.stage) == action:
            self.executor.sums.order.arm(action.stage)
        with self.recorder.span(instruction):
            KINDS[action.kind](self, action)

    def forward(self, action: Action) -> None:
        inputs, outputs = self.outputs(action)
        if "loss" in outputs:
            self.total = self.total + outputs["loss"].detach()
            outputs = {"loss": outputs["loss"] / self.tokens}
        else:
            self.values[makes(action)] = {name: out.detach() for name, out in outputs.items()}
        if torch.is_grad_enabled() and not self.executor.plan.still(action.stage):
            ends = {name: get_gradient_edge(out) for name, out in outputs.items()}
            store = self.executor.store
            uses = store.set_aside() if store else Counter[str]()
            self.held[action.stage, action.micro] = Held(inputs, ends, uses)

    def outputs(self, action: Action) -> tuple[Boundary, Boundary]:
        """Runs a stage forward. Returns its inputs, and its outputs: hidden states, or the summed
        loss.
        """
        stage, micro, executor = action.stage, action.micro, self.executor
        given, parts = self.given[micro], executor.parts[stage]
        inputs = self.values.pop(Value("activation", stage - 1, micro)) if stage > 0 else {}
        if torch.is_grad_enabled() and parts[0] not in executor.plan.marks.still:
            for x in inputs.values():
                x.requires_grad_()
        balancing = executor.balancing(given, self.tokens) if self.trains else None
        ready, starts = executor.await_weights, executor.plan.starts
        out = run_stage(
            executor.model, parts, inputs, given, ready, balancing=balancing, starts=starts
        )
        if executor.shelf:
            executor.shelf.settle()
        for name, load in balancing.loads.items() if balancing else ():
            self.total = self.total + load.loss
            counts = torch.cat([load.tokens, load.dropped[None]])
            self.loads[name] = self.loads[name] + counts if name in self.loads else counts
        if "head" in parts:
            return inputs, {"loss": self.loss(out["hidden"], given.labels, self.tokens)}
        return inputs, {name: out[name] for name in executor.plan.boundary(stage)}

    def backward(self, action: Action) -> None:
        held = self.held.pop((action.stage, action.micro), NOTHING)
        if self.executor.store:
            self.executor.store.expect_again(held.uses)
        self._back(action, held)

    def _back(self, action: Action, held: Held) -> None:
        stage, micro = action.stage, action.micro
        if not held.ends:  # all of the stage is frozen, and so is what is before it
            return
        after = self.values.pop(Value("gradient", stage + 1, micro), None)
        gradients = [after[name] for name in held.ends] if after else None
        torch.autograd.backward(list(held.ends.values()), gradients)
        if held.inputs and not self.executor.plan.still(stage - 1):
            found = {name: x.grad for name, x in held.inputs.items()}
            self.values[makes(action)] = {n: x for n, x in found.items() if x is not None}

    def input_half(self, action: Action) -> None:
        store, held = self.executor.store, self.held.pop((action.stage, action.micro), NOTHING)
        assert store, "a backward pass that is split defers what it adds"
        store.defer()
        self._back(action, held)
        uses = held.uses + store.set_aside()  # plus what was recomputed
        self.late[action.stage, action.micro] = DeferredGrads(store.take_deferred(), uses)

    def weight_half(self, action: Action) -> None:
        queue, uses = self.late.pop((action.stage, action.micro))
        assert self.executor.store
        self.executor.store.expect_again(uses)
        with torch.no_grad():  # as inside of a backward pass
            for add in queue:
                add()

    # -- messages

    def send(self, instruction: Instruction) -> None:
        action, peer = instruction.action, instruction.peer
        assert peer is not None
        began, links = self.recorder.mark(), self.executor.links
        tensors = {name: x.contiguous() for name, x in self.values.pop(makes(action)).items()}
        handles = [links.send(x, peer) for x in tensors.values()]
        handles[-1].then(lambda ended: self.recorder.note(instruction, began, ended))
        self.moving[Verb.SEND, action] = Moving(handles, tensors)

    def receive(self, instruction: Instruction) -> None:
        action, peer = instruction.action, instruction.peer
        assert peer is not None
        made = makes(action)  # a gradient is that of what the stage before has made
        stage = made.stage - (made.name == "gradient")
        tensors = self.executor.empty(stage, self.given[action.micro])
        handles = [self.executor.links.receive(x, peer) for x in tensors.values()]
        self.moving[Verb.RECEIVE, action] = Moving(handles, tensors)

    def wait(self, instruction: Instruction) -> None:
        verb, action, began = instruction.started, instruction.action, self.recorder.mark()
        assert verb is not None
        if verb is Verb.REDUCE:
            if self.last[action.stage] == action:
                with self.recorder.span(Instruction(verb, action)):
                    self.executor.sums.order.finish(action.stage)
        elif verb is Verb.TIE:
            self.executor.sums.order.finish_tied()
            self.recorder.note(Instruction(verb, action, instruction.peer), began)
        else:
            moving = self.moving.pop((verb, action))
            with self.executor.mesh.waited:
                for handle in moving.handles:
                    handle.result()
            if verb is Verb.RECEIVE:
                self.values[makes(action)] = moving.tensors

    # -- gradients

    def reduce(self, instruction: Instruction) -> None:
        action = instruction.action
        if self.last[action.stage] != action:  # the last is completed where it is waited for
            with self.recorder.span(Instruction(Verb.REDUCE, action)):
                self.executor.sums.order.finish(action.stage)

    def tie(self, _: Instruction) -> None:
        self.executor.sums.order.begin_tied()

    def skip(self, _: Instruction) -> None:
        """Does nothing: the training step updates, after it has the norm of the full gradient."""


VERBS: dict[Verb, Callable[[StepRun, Instruction], None]] = {
    Verb.COMPUTE: StepRun.compute,
    Verb.SEND: StepRun.send,
    Verb.RECEIVE: StepRun.receive,
    Verb.WAIT: StepRun.wait,
    Verb.REDUCE: StepRun.reduce,
    Verb.TIE: StepRun.tie,
    Verb.UPDATE: StepRun.skip,
}

KINDS: dict[Kind, Callable[[StepRun, Action], None]] = {
    Kind.FORWARD: StepRun.forward,
    Kind.BACKWARD: StepRun.backward,
    Kind.INPUT: StepRun.input_half,
    Kind.WEIGHT: StepRun.weight_half,
}
