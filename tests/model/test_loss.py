"""The chunked head and loss against logits whole and torch's cross-entropy."""

import gc

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from howdah.model.loss import MASKED, cross_entropy_sum

TOKENS, WIDTH, VOCAB = 23, 8, 37


def draw(dtype, *, scale=1.0):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator, dtype=torch.float64) * scale
    weight = torch.randn(VOCAB, WIDTH, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    labels[[0, 7, 8, 22]] = MASKED
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels


def plain(hidden, weight, labels):
    logits = (hidden @ weight.T).to(torch.promote_types(hidden.dtype, torch.float32))
    return F.cross_entropy(logits, labels, ignore_index=MASKED, reduction="sum")


@pytest.mark.parametrize("chunk", [1, 2, 7, 22, 23, 24, 2048])
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-13), (torch.float32, 1e-6), (torch.bfloat16, 8e-3)]
)
def test_value_and_gradients_equal_the_plain_loss(chunk, dtype, bound):
    hidden, weight, labels = draw(dtype)
    chunked = cross_entropy_sum(hidden, weight, labels, chunk=chunk)
    whole = plain(hidden, weight, labels)
    assert chunked.dtype == whole.dtype
    assert abs(chunked - whole) < min(bound, 1e-6) * whole
    factor = 0.7  # the gradient that comes in is not always 1
    mine = torch.autograd.grad(chunked * factor, (hidden, weight))
    for a, b in zip(mine, torch.autograd.grad(whole * factor, (hidden, weight)), strict=True):
        assert a.dtype == dtype
        assert (a - b).norm() <= bound * b.norm()


@pytest.mark.parametrize("chunk", [5, 100])
def test_huge_logits_do_not_overflow(chunk):
    hidden, weight, labels = draw(torch.float32, scale=1e4)
    chunked, whole = (
        cross_entropy_sum(hidden, weight, labels, chunk=chunk),
        plain(hidden, weight, labels),
    )
    torch.testing.assert_close(chunked, whole)
    gradients = torch.autograd.grad(chunked, (hidden, weight))
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_masked_tokens_have_no_part():
    hidden, weight, labels = draw(torch.float64)
    masked = labels == MASKED
    kept = cross_entropy_sum(hidden[~masked], weight, labels[~masked])
    everything = cross_entropy_sum(hidden, weight, labels, chunk=4)
    torch.testing.assert_close(kept, everything, rtol=1e-13, atol=0)
    gradient, _ = torch.autograd.grad(everything, (hidden, weight))
    assert (gradient[masked] == 0).all() and (gradient[~masked] != 0).all()


@pytest.mark.parametrize("chunk", [3, 64])
def test_only_masked_tokens_give_zero(chunk):
    hidden, weight, labels = draw(torch.float32)
    loss = cross_entropy_sum(hidden, weight, torch.full_like(labels, MASKED), chunk=chunk)
    assert loss == 0
    assert all((grad == 0).all() for grad in torch.autograd.grad(loss, (hidden, weight)))


@pytest.mark.parametrize("chunk", [6, 64])
def test_a_second_backward_pass_gives_the_same(chunk):
    """What the forward pass kept is used up by the first; the second computes it again."""
    hidden, weight, labels = draw(torch.float64)
    loss = cross_entropy_sum(hidden, weight, labels, chunk=chunk)
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    for a, b in zip(first, torch.autograd.grad(loss, (hidden, weight)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


def test_rows_keep_their_shape():
    hidden, weight, labels = draw(torch.float64)
    rows = cross_entropy_sum(hidden[:22].view(2, 11, WIDTH), weight, labels[:22].view(2, 11))
    assert rows == cross_entropy_sum(hidden[:22], weight, labels[:22])


# -- memory --------------------------------------------------------------------


class Peak(TorchDispatchMode):
    """Counts the tensors of at least `size` elements that are alive at one time."""

    def __init__(self, size):
        super().__init__()
        self.size, self.alive, self.peak, self.largest = size, WeakIdKeyDictionary(), 0, 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        out = operation(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
                if tensor.untyped_storage().nbytes() >= self.size * tensor.element_size():
                    self.alive[tensor.untyped_storage()] = True
        self.peak = max(self.peak, len(self.alive))
        return out


def peak_of(loss, dtype, *, size):
    hidden, weight, labels = draw(dtype)
    gc.collect()
    with Peak(size) as peak:
        loss(hidden, weight, labels).backward()
    return peak


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1), (torch.bfloat16, 2)])
def test_logits_of_one_chunk_exist_at_a_time(dtype, bound):
    """In bfloat16 they exist twice for a moment: as the product, and widened."""
    chunk = 10
    peak = peak_of(
        lambda *inputs: cross_entropy_sum(*inputs, chunk=chunk), dtype, size=chunk * VOCAB
    )
    assert peak.largest == chunk * VOCAB
    assert peak.peak == bound


def test_the_counter_sees_the_logits_of_the_plain_loss():
    peak = peak_of(plain, torch.float64, size=TOKENS * VOCAB)
    assert peak.largest == TOKENS * VOCAB
    assert peak.peak > 1
