"""The model against its own table of weights, and as a whole: names, gradients, noise."""

from dataclasses import replace

import pytest
import torch
from random_model import GPT2, LLAMA, QWEN3, STRETCHED, random_model, random_tokens

from howdah.model.loss import cross_entropy_sum
from howdah.model.noise import Noise
from howdah.model.transformer import Transformer
from howdah.plan.layout import Layout
from howdah.plan.support import unsupported
from howdah.shapes.presets import PRESETS, preset
from howdah.shapes.weights import weights

# What the 2017 Transformer has: norm after the block, ReLU, LayerNorm, learned positions.
VASWANI = replace(GPT2, norm_at="after", feedforward="relu", tie_embeddings=False)
SHAPES = {
    "llama": LLAMA,
    "stretched": replace(LLAMA, rope_scaling=STRETCHED, tie_embeddings=True),
    "gpt2": GPT2,
    "qwen3": QWEN3,
    "vaswani": VASWANI,
}
BUILT = [name for name in PRESETS if not unsupported(preset(name), Layout())]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_names_and_shapes_are_those_of_the_table(shape):
    assert_is_the_table(shape)


@pytest.mark.parametrize("name", BUILT)
def test_names_and_shapes_of_every_preset_are_those_of_the_table(name):
    assert_is_the_table(preset(name))


def assert_is_the_table(shape):
    with torch.device("meta"):
        model = Transformer(shape)
    built = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    assert built == {weight.name: weight.shape for weight in weights(shape)}
    assert not list(model.buffers())


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_weight_has_the_gradient_of_finite_differences(shape):
    """A step along a random direction changes the loss as the gradient says."""
    model = random_model(shape)
    tokens, positions = random_tokens(shape, 2, 7)
    documents = torch.tensor([[0] * 7, [0, 0, 0, 1, 1, 1, 1]])
    labels = tokens.roll(-1, 1)

    def loss():
        hidden = model(tokens, positions, documents)
        return cross_entropy_sum(hidden, model.head_weight, labels, chunk=5)

    loss().backward()
    parameters = dict(model.named_parameters())
    gradients = {name: weight.grad for name, weight in parameters.items()}
    largest = max(gradient.norm() for gradient in gradients.values())
    for name, weight in parameters.items():
        direction = torch.randn(
            weight.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64
        )
        direction /= direction.norm()
        step, losses = 1e-5, []
        with torch.no_grad():
            for move in (step, -2 * step):
                weight.add_(direction, alpha=move)
                losses.append(loss())
            weight.add_(direction, alpha=step)
        measured = (losses[0] - losses[1]) / (2 * step)
        assert abs(measured - (gradients[name] * direction).sum()) < 1e-7 * largest, name


def test_gradcheck_of_chosen_weights():
    model = random_model(replace(QWEN3, layers=1, vocab=11))
    tokens, positions = random_tokens(model.shape, 1, 5)
    names = [
        "layers.0.attention_norm.weight",
        "layers.0.attention.q_norm.weight",
        "layers.0.attention.k.weight",
        "norm.weight",
    ]
    chosen = tuple(model.get_parameter(name) for name in names)

    def loss(*replaced):
        swapped = dict(zip(names, replaced, strict=True))
        hidden = torch.func.functional_call(model, swapped, (tokens, positions))
        return cross_entropy_sum(hidden, model.head_weight, tokens.roll(-1, 1), chunk=2)

    # A second backward pass computes the last chunk's softmax anew, so its last bit may differ.
    assert torch.autograd.gradcheck(loss, chosen, nondet_tol=1e-13)


def test_float64_stays_float64_and_half_formats_stay_half():
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for shape in SHAPES.values():
            model = random_model(shape, dtype=dtype)
            assert model(*random_tokens(shape, 1, 4)).dtype == dtype


def test_a_float32_model_is_near_the_float64_one():
    for name, shape in SHAPES.items():
        wide, narrow = random_model(shape), random_model(shape, dtype=torch.float32)
        tokens, positions = random_tokens(shape, 2, 9)
        torch.testing.assert_close(
            narrow(tokens, positions).double(),
            wide(tokens, positions),
            rtol=1e-4,
            atol=1e-4,
            msg=name,
        )


def test_a_later_token_does_not_change_an_earlier_one():
    for shape in SHAPES.values():
        model = random_model(shape)
        tokens, positions = random_tokens(shape, 1, 8)
        changed = tokens.clone()
        changed[0, 5] = (changed[0, 5] + 1) % shape.vocab
        before, after = model(tokens, positions), model(changed, positions)
        assert torch.equal(before[:, :5], after[:, :5])
        assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_dropout_acts_on_every_residual_and_only_with_noise():
    model = random_model(LLAMA, dropout=0.5)
    tokens, positions = random_tokens(LLAMA, 2, 6)
    noise = Noise(seed=1, step=2, samples=torch.tensor([7, 8]))
    quiet, noisy = model(tokens, positions), model(tokens, positions, noise=noise)
    assert torch.equal(quiet, random_model(LLAMA)(tokens, positions))
    assert not torch.allclose(quiet, noisy)
    assert torch.equal(noisy, model(tokens, positions, noise=noise))
    other_step = Noise(seed=1, step=3, samples=noise.samples)
    assert not torch.allclose(noisy, model(tokens, positions, noise=other_step))


def test_dropout_does_not_see_how_the_batch_is_cut():
    model = random_model(LLAMA, dropout=0.3)
    tokens, positions = random_tokens(LLAMA, 4, 6)
    samples = torch.tensor([10, 11, 12, 13])
    whole = model(tokens, positions, noise=Noise(1, 2, samples))
    for rows in ([2], [3, 0]):
        part = model(tokens[rows], positions[rows], noise=Noise(1, 2, samples[rows]))
        torch.testing.assert_close(part, whole[rows], rtol=0, atol=1e-12)
