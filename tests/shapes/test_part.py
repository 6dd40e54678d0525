"""A part has a stack and a layer, and stands where its name does."""

import copy
import json
import pickle

import pytest

from howdah.shapes.part import Part


@pytest.mark.parametrize(
    ("part", "name", "stack", "layer"),
    [
        (Part("layers", 7), "layers.7", "layers", 7),
        (Part("encoder", 0), "encoder.0", "encoder", 0),
        (Part("head"), "head", "head", -1),
    ],
)
def test_a_part_is_its_name(part, name, stack, layer):
    assert part == name and {part: 1} == {name: 1}
    assert json.dumps({part: [part]}) == json.dumps({name: [name]})
    assert (part.stack, part.layer, part.is_block) == (stack, layer, layer >= 0)


@pytest.mark.parametrize(
    "again", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_a_copy_has_stack_and_layer(again):
    """Plans are sent to other processes: a copy that is only text would be no block."""
    for part in (Part("layers", 7), Part("target")):
        other = again(part)
        assert type(other) is Part
        assert (other, other.stack, other.layer) == (part, part.stack, part.layer)


def test_a_part_does_not_change():
    with pytest.raises(AttributeError, match=r"a part does not change: layers\.7\.layer"):
        Part("layers", 7).layer = 8


@pytest.mark.parametrize("given", [("layers.7",), ("layers",), ("head", 0), ("layers", -2), ("",)])
def test_a_name_is_not_read(given):
    with pytest.raises(ValueError, match="is no part of a model"):
        Part(*given)
