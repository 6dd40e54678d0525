"""Pipeline parallelism: runs the lowered program of a schedule on one rank.

    program     receive 0F1 · wait 0F0 · 1F0 · send 1F0 · wait 0F1 · 1F1 · …  · reduce · update
    values      received or computed here, input of a later action        activations, gradients
    held        what a forward keeps for its backward: its input and the graph
    late        weight gradients that an I action has deferred to its W action

The program contains all decisions (`plan/schedule/lowering.py`); here each verb is one small
function. A stage's forward is a plain autograd graph from its input, a leaf, to its output. Its
backward starts from the gradient that the next stage sends. Afterwards the leaf has the gradient
for the stage before:

    F    x = leaf(values) → out; held: x and the edge of out's graph; out is sent on, not kept
    B    backward(edge, gradient) → x.grad is sent back; the entry of held is freed
    I    as B, but the store defers what it would add to weight gradients
    W    adds what the store has deferred

A receive is posted before its value is needed, and waits on a thread of its own. So `receive 2F0 ·
compute 0F0 · send 0F0` on one rank, whose 2F0 is computed elsewhere from that 0F0, does not
deadlock.

Sums over replicas start with a stage's last gradients (`stage_sums.py`). The update needs the norm
of the full gradient, so the training step does it.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from howdah.model.transformer import Transformer
from howdah.parallel.mesh import Mesh
from howdah.parallel.stage_links import StageLinks, directions_of
from howdah.parallel.stage_sums import StageSums
from howdah.parallel.stages import Given, boundary, run_stage
from howdah.parallel.weight_store import UnitWeightStore
from howdah.parallel.zero import UpdatedWeights
from howdah.parallel.zero3 import ShardedWeights
from howdah.plan.plan import Plan
from howdah.plan.program import forward_only, program_of, schedule_of, stage_parts
from howdah.plan.schedule.actions import Action, Kind, Value, makes
from howdah.plan.schedule.lowering import Instruction, Verb, lower
from howdah.shapes.part import Part

Loss = Callable[[Tensor, Tensor], Tensor]  # summed, of hidden states [b, s, h] and labels [b, s]
GRADIENTS = (Kind.BACKWARD, Kind.WEIGHT)  # actions that add to the gradients of weights


class Stages(NamedTuple):
    """What a rank runs its stages with.

    model     the parts of the model that this rank holds
    dtype     the compute dtype
    store     has the weights, and adds to their gradients
    gatherer  brings updated weights from other ranks; None where nothing is gathered
    """

    model: Transformer
    dtype: torch.dtype
    store: UnitWeightStore
    gatherer: UpdatedWeights | ShardedWeights | None


class Held(NamedTuple):
    """What a forward keeps for its backward.

    x     the leaf that it started from; None at the first stage
    end   the edge of the graph at its output
    uses  how often it used each weight
    """

    x: Tensor | None
    end: GradientEdge
    uses: Counter[str]


class DeferredGrads(NamedTuple):
    """What an I action leaves for its W action.

    queue  additions to the gradients of weights
    uses   how often each weight was used
    """

    queue: list[Callable[[], None]]
    uses: Counter[str]


class Pipeline:
    """The stages of a rank, which run step after step.

    exposed  seconds that this rank has waited for messages, over the whole run
    peak     the most pairs (stage, micro-batch) that it held at one time in the last pass
    """

    def __init__(self, plan: Plan, mesh: Mesh, stages: Stages, sums: StageSums) -> None:
        self.plan, self.mesh, self.stages, self.sums = plan, mesh, stages, sums
        self.links = StageLinks(mesh, directions_of(schedule_of(plan)))
        self.parts = stage_parts(plan, mesh.index_of("pp"))
        self.exposed = 0.0
        self.peak = 0
        self._programs: dict[tuple[int, bool], Sequence[Instruction]] = {}

    def train(self, given: Sequence[Given], loss: Loss, *, tokens: float) -> float:
        """Computes the gradients of all micro-batches of a step, and sums them over the ranks.

        Returns the summed loss on the last stage, 0 on others. `tokens` divides the gradients.
        """
        work = StepRun(self, given, loss, tokens=max(tokens, 1.0))
        work.run(self._program(len(given), train=True))
        return float(work.total)

    def evaluate(self, given: Sequence[Given], loss: Loss) -> float:
        """The summed loss of some micro-batches on the last stage, 0 on others; no gradients."""
        work = StepRun(self, given, loss, tokens=1.0)
        work.run(self._program(len(given), train=False))
        return float(work.total)

    def alone(self, stage: int, given: Given, loss: Loss) -> Tensor:
        """The output of one of this rank's stages, run by itself for a measurement; its input is
        zeros.
        """
        work = StepRun(self, [given], loss, tokens=1.0)
        if stage > 0:
            size = boundary(self.plan, self.mesh.rank, given)
            made_up = torch.zeros(size, dtype=self.stages.dtype, device=self.mesh.device)
            work.values[Value("activation", stage - 1, 0)] = made_up
        return work.output(Action(Kind.FORWARD, stage, 0))[1]

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

    total  the summed loss of the micro-batches so far, on the rank of the last stage
    """

    def __init__(
        self, line: Pipeline, given: Sequence[Given], loss: Loss, *, tokens: float
    ) -> None:
        self.line, self.given, self.loss, self.tokens = line, given, loss, tokens
        self.recorder = line.mesh.counters.recorder
        self.total = torch.zeros((), device=line.mesh.device)
        self.values: dict[Value, Tensor] = {}
        self.held: dict[tuple[int, int], Held] = {}
        self.late: dict[tuple[int, int], DeferredGrads] = {}
        self.moving: dict[tuple[Verb, Action], tuple[Future[None], Tensor]] = {}
        self.last: dict[int, Action] = {}  # by stage: the action that completes its gradients
        self.tie: Future[None] | None = None

    def run(self, program: Sequence[Instruction]) -> None:
        """Executes the instructions, one after the other."""
        for instruction in program:
            if instruction.verb is Verb.COMPUTE and instruction.action.kind in GRADIENTS:
                self.last[instruction.action.stage] = instruction.action
        self.line.peak = 0
        for instruction in program:
            VERBS[instruction.verb](self, instruction)
        left = [*self.values, *self.held, *self.late, *self.moving]
        assert not left, f"left over at the end of the program: {left}"

    # -- computing

    def compute(self, instruction: Instruction) -> None:
        action = instruction.action
        if self.last.get(action.stage) == action:
            self.line.sums.arm(action.stage)
        with self.recorder.span(instruction):
            KINDS[action.kind](self, action)
        self.line.peak = max(self.line.peak, len(self.held) + len(self.late))

    def forward(self, action: Action) -> None:
        x, out = self.output(action)
        if "head" in self.line.parts[action.stage]:
            self.total = self.total + out.detach()
            out = out / self.tokens
        else:
            self.values[makes(action)] = out.detach()
        if torch.is_grad_enabled():
            uses = self.line.stages.store.set_aside()
            self.held[action.stage, action.micro] = Held(x, get_gradient_edge(out), uses)

    def output(self, action: Action) -> tuple[Tensor | None, Tensor]:
        """Runs a stage forward. Returns its input, and its output: hidden states, or the summed
        loss.
        """
        stage, micro = action.stage, action.micro
        given, parts = self.given[micro], self.line.parts[stage]
        x = self.values.pop(Value("activation", stage - 1, micro)) if stage > 0 else None
        if x is not None and torch.is_grad_enabled():
            x.requires_grad_()
        self._await_weights(parts)
        out = run_stage(self.line.stages.model, parts, x, given)
        return x, self.loss(out, given.labels) if "head" in parts else out

    def backward(self, action: Action) -> None:
        held = self.held.pop((action.stage, action.micro))
        self.line.stages.store.expect_again(held.uses)
        self._back(action, held)

    def _back(self, action: Action, held: Held) -> None:
        stage, micro, x, end = action.stage, action.micro, held.x, held.end
        gradient = self.values.pop(Value("gradient", stage + 1, micro), None)
        torch.autograd.backward(end, gradient)
        if x is not None:
            assert x.grad is not None
            self.values[makes(action)] = x.grad

    def input_half(self, action: Action) -> None:
        store, held = self.line.stages.store, self.held.pop((action.stage, action.micro))
        store.defer()
        self._back(action, held)
        uses = held.uses + store.set_aside()  # plus what was recomputed
        self.late[action.stage, action.micro] = DeferredGrads(store.take_deferred(), uses)

    def weight_half(self, action: Action) -> None:
        queue, uses = self.late.pop((action.stage, action.micro))
        self.line.stages.store.expect_again(uses)
        with torch.no_grad():  # as inside of a backward pass
            for add in queue:
                add()

    def _await_weights(self, parts: tuple[Part, ...]) -> None:
        """Waits for the weights of embedding and head after an update on other ranks; blocks wait
        for their own.
        """
        gatherer = self.line.stages.gatherer
        for part in ("embedding", "head"):
            if gatherer and part in parts:
                gatherer.wait(part, "tied")

    # -- messages

    def send(self, instruction: Instruction) -> None:
        action, peer = instruction.action, instruction.peer
        assert peer is not None
        x, began = self.values.pop(makes(action)).contiguous(), perf_counter()
        future = self.line.links.send(x, peer)
        future.add_done_callback(lambda _: self.recorder.note(instruction, began))
        self.moving[Verb.SEND, action] = future, x

    def receive(self, instruction: Instruction) -> None:
        action, peer, line = instruction.action, instruction.peer, self.line
        assert peer is not None
        size = boundary(line.plan, line.mesh.rank, self.given[action.micro])
        x = torch.empty(size, dtype=line.stages.dtype, device=line.mesh.device)
        self.moving[Verb.RECEIVE, action] = line.links.receive(x, peer), x

    def wait(self, instruction: Instruction) -> None:
        verb, action, began = instruction.started, instruction.action, perf_counter()
        assert verb is not None
        if verb is Verb.REDUCE:
            if self.last[action.stage] == action:
                with self.recorder.span(Instruction(verb, action)):
                    self.line.sums.finish(action.stage)
            return
        if verb is Verb.TIE:
            assert self.tie is not None
            self.tie.result()
            self.line.sums.tied()
            self.recorder.note(Instruction(verb, action, instruction.peer), began)
        else:
            future, x = self.moving.pop((verb, action))
            future.result()
            if verb is Verb.RECEIVE:
                self.values[makes(action)] = x
        self.line.exposed += perf_counter() - began

    # -- gradients

    def reduce(self, instruction: Instruction) -> None:
        stage = instruction.action.stage
        if self.last[stage] != instruction.action:
            self.line.sums.passed(stage)

    def start_tie(self, _: Instruction) -> None:
        self.tie = self.line.sums.tie()

    def skip(self, _: Instruction) -> None:
        """Does nothing: the training step updates, after it has the norm of the full gradient."""


VERBS: dict[Verb, Callable[[StepRun, Instruction], None]] = {
    Verb.COMPUTE: StepRun.compute,
    Verb.SEND: StepRun.send,
    Verb.RECEIVE: StepRun.receive,
    Verb.WAIT: StepRun.wait,
    Verb.REDUCE: StepRun.reduce,
    Verb.TIE: StepRun.start_tie,
    Verb.UPDATE: StepRun.skip,
}

KINDS: dict[Kind, Callable[[StepRun, Action], None]] = {
    Kind.FORWARD: StepRun.forward,
    Kind.BACKWARD: StepRun.backward,
    Kind.INPUT: StepRun.input_half,
    Kind.WEIGHT: StepRun.weight_half,
}
