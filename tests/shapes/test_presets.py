"""Every preset against the number of parameters its authors published."""

import pytest

from howdah.base.errors import UserError
from howdah.shapes import presets
from howdah.shapes.check import check_shape
from howdah.shapes.parameters import parameters
from howdah.shapes.presets import PRESETS, preset
from howdah.shapes.shape import RopeScaling

# The sum of the tensors of the released checkpoints, as their safetensors headers or index files
# give it. BERT's have a pooler and a next-sentence head more, DeepSeek-V3's a module that predicts
# a second token and 58·256 numbers that balance the load, and Llama 4's 871,932,416 numbers for
# vision: none of them is a part of these models.
PUBLISHED = {
    "gpt2-124m": 124_439_808,
    "gpt2-355m": 354_823_168,
    "gpt2-774m": 774_030_080,
    "gpt2-1.5b": 1_557_611_200,
    "opt-125m": 125_239_296,
    "opt-1.3b": 1_315_758_080,
    "bloom-560m": 559_214_592,
    "bloom-3b": 3_002_557_440,
    "bloom-7b": 7_069_016_064,
    "bloom-176b": 176_247_271_424,
    "bert-base": 109_514_298,
    "bert-large": 335_174_458,
    "roberta-base": 124_697_433,
    "roberta-large": 355_412_057,
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "t5-3b": 2_851_598_336,
    "t5-11b": 11_307_321_344,
    "flan-t5-small": 76_961_152,
    "flan-t5-base": 247_577_856,
    "flan-t5-large": 783_150_080,
    "flan-t5-xl": 2_849_757_184,
    "flan-t5-xxl": 11_135_332_352,
    "llama1-7b": 6_738_415_616,
    "llama1-13b": 13_015_864_320,
    "llama1-33b": 32_528_943_616,
    "llama1-65b": 65_285_660_672,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-1b": 1_235_814_400,
    "llama3-3b": 3_212_749_824,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "tinyllama-1.1b": 1_100_048_384,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "mistral-7b": 7_241_732_096,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 671_026_419_200 - 58 * 256,
    "llama4-scout": 108_641_793_536 - 871_932_416,
    "llama4-maverick": 401_583_781_376 - 871_932_416,
}
# Never released, or without a stated total: billions as their papers print them, and what the
# published sizes give.
PRINTED = {
    "gpt3-175b": ("175", 174_604_259_328),
    "opt-6.7b": ("6.7", 6_658_473_984),
    "opt-13b": ("13", 12_853_473_280),
    "opt-30b": ("30", 29_974_540_288),
    "opt-175b": ("175", 174_604_468_224),
    "megatron-1.2b": ("1.2", 1_213_479_936),
    "megatron-2.5b": ("2.5", 2_490_408_960),
    "megatron-4.2b": ("4.2", 4_199_109_120),
    "megatron-8.3b": ("8.3", 8_317_040_640),
    "megatron-7.5b": ("7.5", 7_467_786_240),
    "megatron-145b": ("145.6", 145_622_261_760),
    "megatron-530b": ("529.6", 529_600_819_200),
    "megatron-1t": ("1008.0", 1_008_038_758_400),
}
# Billions that a token meets, from the same sources. All but DeepSeek count the embedding.
ACTIVE = {
    "mixtral-8x7b": 13,
    "mixtral-8x22b": 39,
    "qwen3-30b-a3b": 3,
    "qwen3-235b-a22b": 22,
    "deepseek-v2": 21,
    "deepseek-v3": 37,
    "llama4-scout": 17,
    "llama4-maverick": 17,
}


def test_every_preset_of_a_paper_has_a_published_total():
    assert set(PRESETS) - {"laptop"} == {*PUBLISHED, *PRINTED}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_weights_add_up_to_the_published_total(name):
    assert parameters(preset(name)).total == PUBLISHED[name]


@pytest.mark.parametrize("name", PRINTED)
def test_the_weights_add_up_to_the_total_that_the_paper_prints(name):
    printed, total = PRINTED[name]
    assert parameters(preset(name)).total == total
    assert f"{total / 1e9:.{len(printed.partition('.')[2])}f}" == printed


@pytest.mark.parametrize("name", ACTIVE)
def test_a_token_meets_the_published_part_of_a_mixture(name):
    count = parameters(preset(name))
    uncounted = count.embedding if name.startswith("deepseek") else 0
    assert round((count.active - uncounted) / 1e9) == ACTIVE[name]


def test_the_table_of_mixtures_is_right():
    drawn = [line.split() for line in presets.__doc__.splitlines()]
    rows = {row[0]: row for row in drawn if row and row[0] in PRESETS}
    assert len(rows) == 4
    for name, row in rows.items():
        count, experts = parameters(preset(name)), preset(name).experts
        assert [int(row[1]), int(row[2])] == [experts.count, experts.top_k]
        assert row[-2:] == [f"{number / 1e9:.1f}B" for number in (count.total, count.active)]


@pytest.mark.parametrize("name", PRESETS)
def test_nothing_is_wrong_with_the_sizes(name):
    assert check_shape(preset(name)) == []


def test_the_laptop_preset_is_small_and_splits_well():
    shape = preset("laptop")
    assert 3_000_000 < parameters(shape).total < 4_000_000
    assert (shape.width % 32, shape.ffn_size % 32, shape.vocab % 32) == (0, 0, 0)
    assert shape.d == 64


def test_llama_3_stretches_rotary_positions_of_8192():
    assert preset("llama3-8b").rope_scaling == RopeScaling(8.0, 1.0, 4.0, 8192)
    assert preset("llama3-1b").rope_scaling == RopeScaling(32.0, 1.0, 4.0, 8192)
    assert preset("llama2-7b").rope_scaling is None


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(UserError, match=r"^model.preset 'llama3-7b' .*did you mean 'llama3-70b'"):
        preset("llama3-7b")
    with pytest.raises(UserError, match=r"of 70 that are known the nearest are: "):
        preset("elephant")
