"""Compares the evidence of a layout with that of the reference, tensor by tensor.

float64   ‖Δ‖ ≤ 1e-10·‖g‖ + 1e-13·‖g_all‖      gradients; the same for parameters. The second
                                               term is for gradients that are exactly zero in
                                               theory, such as a key's bias.
float32   ‖Δ‖ ≤ C·4·1.03^(L+1-l)·ε·‖g‖ + 1e-9·‖g_all‖      form and growth factor from
                                               https://arxiv.org/abs/2506.09280; l is the depth
bf16      ‖Δ‖ ≤ 4·‖noise‖ + ε·‖g‖               noise: the difference between the reference and
                                               the reference with its samples added up in the
                                               opposite order, or, with tp, in float32

C was measured on layouts that are correct in float64; the comment at FLOAT32_C has the numbers.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from howdah.plan.method import Precision
from howdah.shapes.weights import parts_of
from howdah.verify.case import Case
from howdah.verify.evidence import Arrays, Evidence

# Measured C of layouts that are correct in float64: at most 0.64 over dp 1 to 4, x1 and x3, for the
# miniatures of four presets (laptop, GPT-2, Qwen 3, Llama 3). About three times that is allowed.
FLOAT32_C = 2.0
LOSS_BOUND: dict[Precision, float] = {"float64": 1e-10, "float32": 1e-6, "bf16": 1e-2}
EPSILON = {"float32": 2.0**-23, "bf16": 2.0**-8}


@dataclass(frozen=True)
class Difference:
    """One compared value or tensor.

    what   its name
    apart  the difference: of a value, or the norm of that of a tensor
    bound  the largest difference that is allowed
    """

    what: str
    apart: float
    bound: float

    @property
    def used(self) -> float:
        """The difference as a share of its bound; above 1 the comparison fails."""
        if self.bound:
            return self.apart / self.bound
        return 0.0 if self.apart == 0 else np.inf


def compare(
    case: Case, mine: Evidence, theirs: Evidence, noise: Evidence | None
) -> list[Difference]:
    """All differences between a layout and the reference, in the order of computation.

    mine    evidence of the layout's rank 0
    theirs  evidence of the reference
    noise   for bf16: evidence of the reference with different rounding
    """
    precision = case.method.precision
    found = []
    for step, (a, b) in enumerate(zip(mine.losses, theirs.losses, strict=True)):
        found.append(_scalar(f"loss of step {step + 1}", a, b, precision))
    # Adam divides by the size of a gradient. So after an update, rounding is no longer small in
    # every gradient: in float32 and bf16 only the norm of the first step has a bound.
    steps = case.steps if precision == "float64" else 1
    for step in range(steps):
        a, b = mine.norms[step], theirs.norms[step]
        found.append(_scalar(f"gradient norm of step {step + 1}", a, b, precision))
    bound = _gradient_bound(case, theirs.gradients, noise.gradients if noise else {})
    for name in reversed(theirs.gradients):  # backward computes the last weights first
        apart = _norm(mine.gradients[name] - theirs.gradients[name])
        found.append(Difference(f"gradient of {name}", apart, bound(name)))
    if precision == "float64":
        all_of_them = _norm_of_all(theirs.parameters)
        for name, value in theirs.parameters.items():
            apart = _norm(mine.parameters[name] - value)
            limit = 1e-10 * _norm(value) + 1e-13 * all_of_them
            found.append(Difference(f"{name} after {case.steps} steps", apart, limit))
    return found


def _scalar(what: str, mine: float, theirs: float, precision: Precision) -> Difference:
    return Difference(what, abs(mine - theirs), LOSS_BOUND[precision] * abs(theirs))


def _gradient_bound(case: Case, theirs: Arrays, noise: Arrays) -> Callable[[str], float]:
    all_of_them = _norm_of_all(theirs)
    depths = {weight.name: _depth(weight.unit, case) for weight in case.plan.weights}

    def bound(name: str) -> float:
        own = _norm(theirs[name])
        if case.method.precision == "float64":
            return 1e-10 * own + 1e-13 * all_of_them
        if case.method.precision == "float32":
            growth = 1.03 ** (case.shape.layers + 1 - depths[name])
            return FLOAT32_C * 4 * growth * EPSILON["float32"] * own + 1e-9 * all_of_them
        rounding = _norm(noise[name] - theirs[name])
        return 4 * rounding + EPSILON["bf16"] * own + EPSILON["bf16"] ** 2 * all_of_them

    return bound


def _depth(unit: str, case: Case) -> int:
    """Depth of a unit: 0 for the embedding, 1 to L for the blocks, L + 1 for the head."""
    part = parts_of(unit, case.shape)[0]
    if part.is_block:
        return part.layer + 1
    return case.shape.layers + 1 if part == "head" else 0


def _norm(array: npt.NDArray[np.float64]) -> float:
    return float(np.linalg.norm(array.reshape(-1)))


def _norm_of_all(arrays: Arrays) -> float:
    return float(np.sqrt(sum(_norm(array) ** 2 for array in arrays.values())))
