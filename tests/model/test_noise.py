"""Noise without state: bits, slices, moments, and dropout that sees samples and not batches."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from howdah.base import seeds
from howdah.model.noise import CHUNK, Noise, dropout, fill_normal, mix, normal

CPU = torch.device("cpu")
KEYS = [0, 1, 2**63, 2**64 - 1, seeds.key(7, "layers.0.attention.q.weight")]


@pytest.mark.parametrize("key", KEYS)
def test_mix_equals_the_plan_floors_bit_for_bit(key):
    counters = np.array([0, 1, 2, 1000, 2**32, 2**62, 2**63 - 1], dtype=np.uint64)
    here = mix(key, torch.from_numpy(counters.astype(np.int64)))
    assert (here.numpy().view(np.uint64) == seeds.mix(key, counters)).all()


def test_mix_equals_the_published_splitmix64():
    """The first outputs of Java's SplittableRandom and of the C reference, for state 1234567."""
    words = mix(1234567, torch.arange(1, 4)).numpy().view(np.uint64)
    assert words.tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize(("start", "stop"), [(0, 1000), (3, 4), (500, 1000), (999, 1000)])
def test_a_slice_of_the_normal_numbers_is_the_slice_of_the_whole(start, stop):
    assert torch.equal(
        normal(5, torch.arange(start, stop)), normal(5, torch.arange(1000))[start:stop]
    )


def test_normal_numbers_have_the_moments_of_their_distribution():
    drawn = normal(seeds.key("moments"), torch.arange(1 << 20)).double()
    count = len(drawn)
    assert abs(drawn.mean()) < 4 / count**0.5
    assert abs(drawn.var() - 1) < 4 * (2 / count) ** 0.5
    assert abs((drawn**3).mean()) < 0.02
    assert abs((drawn**4).mean() - 2.7) < 0.02  # Irwin-Hall of four: 3 - 6/(5·4)
    assert drawn.abs().max() <= 3.4642
    neighbours = (drawn[1:] * drawn[:-1]).mean()
    assert abs(neighbours) < 4 / count**0.5


def after(start, index):
    return index + start


def test_keys_name_different_numbers():
    assert not torch.equal(normal(1, torch.arange(100)), normal(2, torch.arange(100)))


def test_fill_normal_is_the_same_in_parts_and_over_the_chunk(monkeypatch):
    monkeypatch.setattr("howdah.model.noise.CHUNK", 64)
    assert CHUNK > 64
    whole = torch.empty(300)
    fill_normal(whole, key=9, mean=0.5, spread=0.02)
    assert torch.equal(whole, 0.5 + 0.02 * normal(9, torch.arange(300)))
    parts = [torch.empty(stop - start) for start, stop in ((0, 70), (70, 71), (71, 300))]
    for part, start in zip(parts, (0, 70, 71), strict=True):
        fill_normal(part, key=9, index_of=partial(after, start), mean=0.5, spread=0.02)
    assert torch.equal(torch.cat(parts), whole)


def test_fill_normal_casts_at_the_end_and_knows_constants():
    half, wide = torch.empty(50, dtype=torch.bfloat16), torch.empty(50)
    for out in (half, wide):
        fill_normal(out, key=3, index_of=lambda index: index + 8, mean=0.0, spread=0.02)
    assert torch.equal(half, wide.bfloat16())
    fill_normal(wide, key=3, mean=1.0, spread=0.0)
    assert (wide == 1).all()


# -- dropout -------------------------------------------------------------------


def noise_of(samples, *, seed=1, step=2):
    return Noise(seed=seed, step=step, samples=torch.tensor(samples))


def test_dropout_keeps_the_mean_and_drops_the_share():
    x = torch.ones(4, 64, 128)
    out = dropout(x, "here", share=0.3, noise=noise_of([0, 1, 2, 3]))
    dropped = (out == 0).double().mean()
    assert abs(dropped - 0.3) < 4 * (0.3 * 0.7 / x.numel()) ** 0.5
    torch.testing.assert_close(out[out != 0], torch.full_like(out[out != 0], 1 / 0.7))


def test_a_samples_mask_is_the_same_in_any_batch():
    x = torch.ones(5, 8, 16)
    whole = dropout(x, "here", share=0.5, noise=noise_of([30, 31, 32, 33, 34]))
    for rows, samples in (([2], [32]), ([4, 0], [34, 30]), ([1, 2, 3], [31, 32, 33])):
        part = dropout(x[rows], "here", share=0.5, noise=noise_of(samples))
        assert torch.equal(part, whole[rows])


def test_masks_differ_by_seed_step_name_sample_position_and_feature():
    x = torch.ones(1, 64, 64)
    base = dropout(x, "here", share=0.5, noise=noise_of([3]))
    others = [
        dropout(x, "there", share=0.5, noise=noise_of([3])),
        dropout(x, "here", share=0.5, noise=noise_of([4])),
        dropout(x, "here", share=0.5, noise=noise_of([3], seed=2)),
        dropout(x, "here", share=0.5, noise=noise_of([3], step=3)),
        base.transpose(1, 2),
        base.roll(1, 1),
        base.roll(1, 2),
    ]
    for other in others:
        agreement = (base == other).double().mean()
        assert abs(agreement - 0.5) < 0.05


def test_dropout_gradient_has_the_mask_of_the_forward_pass():
    x = torch.ones(2, 4, 8, requires_grad=True)
    out = dropout(x, "here", share=0.5, noise=noise_of([0, 1]))
    out.sum().backward()
    assert torch.equal(x.grad, out.detach())


def test_without_noise_or_share_dropout_is_nothing():
    x = torch.ones(1, 2, 3)
    assert dropout(x, "here", share=0.5, noise=None) is x
    assert dropout(x, "here", share=0.0, noise=noise_of([0])) is x


def test_noise_is_where_it_is_used():
    """It was copied to the device at every dropout."""
    x = torch.ones(2, 3, 4, device="meta")
    there = Noise(1, 2, torch.arange(2, device="meta"))
    assert dropout(x, "a", share=0.1, noise=there).device == x.device
    with pytest.raises(RuntimeError, match="device"):
        dropout(x, "a", share=0.1, noise=replace(there, samples=torch.arange(2)))
