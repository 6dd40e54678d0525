"""The bounds: what is within passes, what is just over fails, and nothing is left out."""

from dataclasses import replace

import numpy as np
import pytest
from small_cases import case_of

from howdah.shapes.weights import weights
from howdah.verify.compare import Difference, compare
from howdah.verify.evidence import Evidence

FIRST, LAST = "embedding.weight", "norm.weight"


def evidence(case, *, scale=1.0):
    """Made-up gradients of norm `scale` and parameters of norm 1 for every weight."""
    arrays = {}
    for weight in weights(case.shape):
        arrays[weight.name] = np.full(weight.shape, 1 / np.sqrt(weight.elements))
    gradients = {name: scale * array for name, array in arrays.items()}
    return Evidence([2.0] * case.steps, [3.0] * case.steps, gradients, arrays)


def moved(values, name, by):
    """The arrays with one of them moved by a distance."""
    step = np.zeros_like(values[name])
    step.flat[0] = by
    return {**values, name: values[name] + step}


def used(differences):
    return {d.what: d.used for d in differences}


def test_everything_is_compared_in_the_order_of_computing():
    case = case_of("dp2 x1")
    names = list(evidence(case).gradients)
    found = [d.what for d in compare(case, evidence(case), evidence(case), None)]
    assert found == [
        *("loss of step 1", "loss of step 2", "gradient norm of step 1", "gradient norm of step 2"),
        *(f"gradient of {name}" for name in reversed(names)),
        *(f"{name} after 2 steps" for name in names),
    ]
    assert set(used(compare(case, evidence(case), evidence(case), None)).values()) == {0.0}


def test_float64_bounds_by_hand():
    case = case_of("dp2 x1")
    theirs = evidence(case)
    every = np.sqrt(len(theirs.gradients))  # each has norm 1
    bound = 1e-10 + 1e-13 * every
    for share, fails in ((0.5, False), (2.0, True)):
        mine = replace(
            theirs,
            losses=[2.0 * (1 + share * 1e-10), 2.0],
            norms=[3.0, 3.0 * (1 - share * 1e-10)],
            gradients=moved(theirs.gradients, FIRST, share * bound),
            parameters=moved(theirs.parameters, LAST, share * bound),
        )
        over = [what for what, part in used(compare(case, mine, theirs, None)).items() if part > 1]
        changed = ["loss of step 1", "gradient norm of step 2", f"gradient of {FIRST}"]
        assert over == ([*changed, f"{LAST} after 2 steps"] if fails else [])


def test_a_gradient_of_zero_is_bound_by_all_of_them():
    """The key's bias: exactly zero in theory, rounding in practice."""
    case = case_of("dp2 x1")
    theirs = evidence(case)
    theirs.gradients[FIRST][:] = 0
    every = np.sqrt(len(theirs.gradients) - 1)
    for share in (0.5, 2.0):
        mine = replace(theirs, gradients=moved(theirs.gradients, FIRST, share * 1e-13 * every))
        part = used(compare(case, mine, theirs, None))[f"gradient of {FIRST}"]
        assert part == pytest.approx(share)


def test_float32_bounds_grow_towards_the_first_layers():
    case = case_of("dp2 x1", precision="float32")
    bounds = {d.what: d.bound for d in compare(case, evidence(case), evidence(case), None)}
    per_layer = [bounds[f"gradient of layers.{n}.attention.q.weight"] for n in range(2)]
    last, first = bounds[f"gradient of {LAST}"], bounds[f"gradient of {FIRST}"]
    assert first > per_layer[0] > per_layer[1] > last
    assert last == pytest.approx(8 * 2**-23 + 1e-9 * np.sqrt(20), rel=1e-6)
    # After an update rounding is no longer small, so that only float64 compares beyond the first.
    assert "gradient norm of step 2" not in bounds
    assert not any("after" in what for what in bounds)


def test_bf16_is_bound_by_the_references_own_noise():
    case = case_of("dp2 x1", precision="bf16")
    theirs = evidence(case)
    quiet, loud = (replace(theirs, gradients=moved(theirs.gradients, FIRST, n)) for n in (0, 0.1))
    mine = replace(theirs, gradients=moved(theirs.gradients, FIRST, 0.2))
    what = f"gradient of {FIRST}"
    assert used(compare(case, mine, theirs, quiet))[what] > 10
    assert used(compare(case, mine, theirs, loud))[what] == pytest.approx(0.5, rel=0.05)


@pytest.mark.parametrize("precision", ["float64", "float32", "bf16"])
def test_nan_is_not_within_any_bound(precision):
    case = case_of("dp2 x1", precision=precision)
    theirs = evidence(case)
    mine = replace(theirs, gradients=moved(theirs.gradients, FIRST, np.nan), losses=[np.nan, 2.0])
    found = used(compare(case, mine, theirs, theirs))
    assert not found[f"gradient of {FIRST}"] <= 1
    assert not found["loss of step 1"] <= 1


def test_a_bound_of_zero_allows_nothing():
    assert Difference("loss", apart=0.0, bound=0.0).used == 0
    assert not Difference("loss", apart=1e-300, bound=0.0).used <= 1


def test_a_missing_step_is_told():
    case = case_of("dp2 x1")
    short = replace(evidence(case), losses=[2.0])
    with pytest.raises(ValueError, match="longer"):
        compare(case, short, evidence(case), None)
