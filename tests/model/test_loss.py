"""The chunked head and loss against logits whole and torch's cross-entropy."""

import gc
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from howdah.model.loss import MASKED, NONE, Terms, chunks, cross_entropy_sum

TOKENS, WIDTH, VOCAB = 23, 8, 37


def draw(dtype, *, scale=1.0):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator, dtype=torch.float64) * scale
    weight = torch.randn(VOCAB, WIDTH, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    labels[[0, 7, 8, 22]] = MASKED
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels


def plain(hidden, weight, labels, terms=NONE):
    logits = (hidden @ weight.T).to(torch.promote_types(hidden.dtype, torch.float32))
    smoothing = terms.smoothing
    loss = F.cross_entropy(
        logits, labels, ignore_index=MASKED, reduction="sum", label_smoothing=smoothing
    )
    return loss + terms.z * logits.logsumexp(-1)[labels != MASKED].square().sum()


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


@pytest.mark.parametrize("chunk", [5, 23, 100])
@pytest.mark.parametrize("terms", [Terms(smoothing=0.2), Terms(z=0.3), Terms(0.1, 0.01)], ids=str)
def test_terms_are_those_of_the_formula(chunk, terms):
    hidden, weight, labels = draw(torch.float64)
    chunked = cross_entropy_sum(hidden, weight, labels, chunk=chunk, terms=terms)
    whole = plain(hidden, weight, labels, terms)
    torch.testing.assert_close(chunked, whole, rtol=1e-13, atol=0)
    mine = torch.autograd.grad(chunked * 0.7, (hidden, weight))
    for a, b in zip(mine, torch.autograd.grad(whole * 0.7, (hidden, weight)), strict=True):
        assert (a - b).norm() <= 1e-13 * b.norm()


@pytest.mark.parametrize("chunk", [5, 100])
@pytest.mark.parametrize("divisor", [1.0, 7.0])
def test_what_the_loss_will_be_divided_by_changes_no_gradient(chunk, divisor):
    """Also where it is divided by something else in the end."""
    hidden, weight, labels = draw(torch.float64)
    loss = cross_entropy_sum(hidden, weight, labels, chunk=chunk, terms=Terms(tokens=7.0))
    mine = torch.autograd.grad(loss / divisor, (hidden, weight))
    wanted = torch.autograd.grad(plain(hidden, weight, labels) / divisor, (hidden, weight))
    for a, b in zip(mine, wanted, strict=True):
        assert (a - b).norm() <= 1e-13 * b.norm()


class Shelf:
    """A head that is no tensor of autograd."""

    def __init__(self, weight):
        self.weight, self.sum, self.adds = weight.detach(), torch.zeros_like(weight), 0

    def value(self):
        return self.weight

    def add(self, add, *, now=False):
        add(self.sum)
        self.adds += 1


@pytest.mark.parametrize("chunk", [5, 100])
def test_a_head_by_handle_is_given_its_gradient_chunk_by_chunk(chunk):
    hidden, weight, labels = draw(torch.float64)
    shelf = Shelf(weight)
    mine = torch.autograd.grad(cross_entropy_sum(hidden, shelf, labels, chunk=chunk), hidden)
    wanted = torch.autograd.grad(plain(hidden, weight, labels), (hidden, weight))
    torch.testing.assert_close(mine[0], wanted[0], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(shelf.sum, wanted[1], rtol=1e-12, atol=1e-14)
    assert shelf.adds == len(chunks(TOKENS, chunk))


class Part:
    """The rows of a head from `first` on; the parts meet at a board, each in a thread."""

    def __init__(self, first, board, meeting):
        self.first, self.vocab, self._board, self._meeting = first, VOCAB, board, meeting
        self.keeps = False

    def combine(self, x, op):
        self._board[self.first] = x.clone()
        self._meeting.wait()
        both = torch.stack([self._board[first] for first in sorted(self._board)])
        self._meeting.wait()
        x.copy_(both.amax(0) if op == "max" else both.sum(0))

    def gather_in(self, hidden):
        return hidden

    def reduce_out(self, gradient):
        return lambda: gradient


@pytest.mark.parametrize("scale", [1.0, 1e3])
@pytest.mark.parametrize("terms", [NONE, Terms(0.1, 0.01)], ids=str)
@pytest.mark.parametrize("chunk", [5, 100])
def test_parts_of_a_vocabulary_that_does_not_divide_make_one_loss(chunk, terms, scale):
    """Label smoothing was silently wrong with logits in parts (Megatron-LM #7452), and so was
    a vocabulary that the parts did not divide (#1754). Here 37 rows are 18 and 19.
    """
    hidden, weight, labels = draw(torch.float64, scale=scale)
    cuts, board, meeting = [(0, 18), (18, VOCAB)], {}, Barrier(2)

    def run(cut):
        rows = weight[slice(*cut)].detach().requires_grad_()
        part = Part(cut[0], board, meeting)
        loss = cross_entropy_sum(hidden, rows, labels, shards=part, terms=terms, chunk=chunk)
        return loss, torch.autograd.grad(loss, (hidden, rows))

    with ThreadPoolExecutor(2) as threads:
        (one, mine), (other, theirs) = threads.map(run, cuts)
    whole = plain(hidden, weight, labels, terms)
    d_hidden, d_weight = torch.autograd.grad(whole, (hidden, weight))
    assert torch.equal(one, other)
    torch.testing.assert_close(one, whole, rtol=1e-12, atol=0)
    near = {"rtol": 1e-10, "atol": 1e-12 * float(d_weight.abs().max())}
    torch.testing.assert_close(mine[0] + theirs[0], d_hidden, **near)
    torch.testing.assert_close(torch.cat([mine[1], theirs[1]]), d_weight, **near)


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


@pytest.mark.slow_after(1)
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
