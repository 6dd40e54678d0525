"""How many parameters a model has: the table of weights, added up by component.

Blocks of a kind are counted once and multiplied, so that a thousand layers cost what one does. A
test holds the sums equal to a closed formula and to the published totals.
"""

from collections import Counter
from dataclasses import dataclass

from howdah.shapes.shape import ModelShape
from howdah.shapes.weights import ROUTER_BIAS, part_kinds, part_weights


@dataclass(frozen=True)
class Parameters:
    """Parameters of the whole model by component; they add up to `total`.

    embedding    a row for each token; a tied head is counted here, once
    positions    learned positions, token types, tables of relative positions
    attention    all of it, cross attention and the norms inside included
    feedforward  the dense ones, and the shared experts
    router       a row for each expert; not the bias, which a rule moves and no gradient
    experts      the routed experts
    norms        around the blocks, at the end, behind the embedding
    head         of its own, and the transform or pooler in front of it
    active       what one token meets: everything, but of the routed experts only the chosen
    """

    embedding: int = 0
    positions: int = 0
    attention: int = 0
    feedforward: int = 0
    router: int = 0
    experts: int = 0
    norms: int = 0
    head: int = 0
    active: int = 0

    @property
    def total(self) -> int:
        blocks = self.attention + self.feedforward + self.router + self.experts + self.norms
        return self.embedding + self.positions + blocks + self.head


# The component that counts what has another name; norms around the sub-layers are `norms`.
COMPONENTS = {
    "token_types": "positions",
    "relative": "positions",
    "cross": "attention",
    "shared": "feedforward",
    "shared_gate": "feedforward",
    "pooler": "head",
    "transform": "head",
    "transform_norm": "head",
}


def parameters(shape: ModelShape) -> Parameters:
    """The exact number of parameters."""
    found: Counter[str] = Counter()
    for part, number in part_kinds(shape).items():
        for weight in part_weights(shape, part):
            if not weight.name.endswith(ROUTER_BIAS):
                found[_component(weight.name)] += number * weight.elements
    idle = 0
    if (experts := shape.experts) is not None:
        idle = found["experts"] // experts.count * (experts.count - experts.top_k)
    return Parameters(**found, active=found.total() - idle)


def _component(name: str) -> str:
    """layers.7.attention.q.weight → attention."""
    first, *inside = name.split(".")
    place = inside[1] if first in ("encoder", "layers") else first
    return COMPONENTS.get(place, "norms" if place.endswith("norm") else place)
