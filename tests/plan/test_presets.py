"""Every preset against the number of parameters its authors published."""

import pytest

from howdah.plan.presets import PRESETS, preset
from howdah.plan.problems import BadInput
from howdah.plan.shapes import RotaryScaling, check_shape, parameters
from howdah.plan.sharding import weights

# The sum of the tensors of the released checkpoints. GPT-3 was never released: its total is
# what the published sizes give, and the paper prints it as 175.0B.
PUBLISHED = {
    "gpt2-124m": 124_439_808,
    "gpt2-355m": 354_823_168,
    "gpt2-774m": 774_030_080,
    "gpt2-1.5b": 1_557_611_200,
    "gpt3-175b": 174_604_259_328,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-1b": 1_235_814_400,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "qwen3-8b": 8_190_735_360,
}


def test_every_preset_of_a_paper_has_a_published_total():
    assert set(PRESETS) - {"laptop"} == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_formula_gives_the_published_total(name):
    assert parameters(preset(name)).total == PUBLISHED[name]


@pytest.mark.parametrize("name", PRESETS)
def test_the_formula_and_the_table_count_the_same_weights(name):
    assert (
        sum(weight.elements for weight in weights(preset(name))) == parameters(preset(name)).total
    )


@pytest.mark.parametrize("name", PRESETS)
def test_nothing_is_wrong_with_the_sizes(name):
    assert check_shape(preset(name)) == []


def test_the_laptop_preset_is_small_and_splits_well():
    shape = preset("laptop")
    assert 3_000_000 < parameters(shape).total < 4_000_000
    assert (shape.width % 32, shape.ffn % 32, shape.vocab % 32) == (0, 0, 0)
    assert shape.d == 64


def test_llama_3_stretches_rotary_positions_of_8192():
    assert preset("llama3-8b").rotary_scaling == RotaryScaling(8.0, 1.0, 4.0, 8192)
    assert preset("llama3-1b").rotary_scaling == RotaryScaling(32.0, 1.0, 4.0, 8192)
    assert preset("llama2-7b").rotary_scaling is None


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(BadInput, match=r"^model.preset 'llama3-7b' .*did you mean 'llama3-70b'"):
        preset("llama3-7b")
    with pytest.raises(BadInput, match=r"known are: gpt2-1.5b, .*, qwen3-8b"):
        preset("elephant")
