"""Training steps on a GPU without data: the host never waits for it, in any layout.

Each mutation puts back one of the waits that steps once had; the fake card has to name it.
"""

from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import fake_card
import pytest
import torch
from fake_card import CARD, HostWaits, there_is_one, train_on_card
from small_cases import FORMS

from howdah.comm.spawn import Workers
from howdah.model import transformer
from howdah.model.noise import dropout
from howdah.optim import clip
from howdah.parallel import tensor
from howdah.parallel.executor import Executor
from howdah.parallel.home_lanes import CardLane
from howdah.parallel.homes import Homes
from howdah.plan.method import Method, Optimizer
from howdah.shapes.presets import preset
from howdah.train import step
from howdah.train.step import StepContext

BF16 = Method("bf16", dropout=0.1)
LAYOUTS = [  # and the last rank of each
    ("single", 0),
    ("dp2 zero3", 1),
    ("tp2 sp", 1),
    ("pp2 zb-h1 x4", 1),
    ("dp2 tp2 zero2", 3),
    *(
        pytest.param(layout, 1, marks=pytest.mark.slow)
        for layout in ("dp2", "dp2 zero1", "dp2 zero2", "tp2", "pp2 1f1b x4")
    ),
]


@pytest.fixture(scope="module")
def card():
    """A process in which torch knows a device that is made up; that of the tests must not."""
    if not there_is_one():
        pytest.skip(f"this torch cannot name a device in Python: it has no {fake_card.SETUP}")
    with closing(Workers(1)) as one:
        yield one


def trained(_, shape, layout, method, mutation=None, *how):
    """For the worker: what `train_on_card` returns, or why it is refused."""
    with ExitStack() as stack:
        for where, name, new in MUTATIONS[mutation] if mutation else ():
            stack.enter_context(patch.object(where, name, new))
        try:
            return train_on_card(shape, layout, method, *how)
        except (HostWaits, RuntimeError) as waits:
            return str(waits)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("layout", "last"), LAYOUTS)
def test_no_step_waits_for_the_card(card, layout, last):
    for form, rank in (("laptop", 0), ("gpt2", last)):
        (found,) = card.run(trained, FORMS[form], layout, BF16, None, rank, 2)
        assert found == [CARD]


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("documents", [1, 2])
@pytest.mark.parametrize(
    "method",
    [
        Method("float32", Optimizer("adam"), grad_clip=0.0),
        Method("float32", Optimizer("rmsprop")),
        Method("float64", dropout=0.1),
        Method("bf16", label_smoothing=0.1, z_loss=1e-4),
    ],
    ids=["adam", "rmsprop", "float64", "bf16"],
)
def test_nor_does_another_method(card, method, documents):
    """torch has no fake of its fused SGD."""
    shape = FORMS["laptop"]
    assert card.run(trained, shape, "dp2 zero1", method, None, 0, 2, 16, documents) == [[CARD]]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp8 zero1", "dp8 zero3 recompute=full"])
def test_nor_does_a_step_of_eight_billion_weights(card, layout):
    shape = preset("llama3-8b")
    assert card.run(trained, shape, layout, Method("bf16"), None, 0, 1, 4096) == [[CARD]]


# -- homes ---------------------------------------------------------------------------

STATES = "weights=host gradients=host optimizer=host"


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("form", ["laptop", "untied"])
@pytest.mark.parametrize(
    ("words", "method", "found"),
    [
        (f"single x2 {STATES}", BF16, ["cpu"]),
        (f"dp2 zero3 x2 {STATES}", BF16, ["cpu"]),
        ("dp2 x2 weights=host optimizer=host", Method("float32"), [CARD, "cpu"]),
        ("single x2 optimizer=host", Method("bf16", Optimizer(delay=True)), [CARD, "cpu"]),
        ("single x2 optimizer=host", Method("bf16", Optimizer(average=0.9)), [CARD, "cpu"]),
        *(
            pytest.param(words, BF16, [CARD, "cpu"], marks=pytest.mark.slow)
            for words in (
                "single x2 gradients=host optimizer=host",
                "dp2 zero1 x2 optimizer=host",
                "dp2 tp2 zero2 x2 gradients=host optimizer=host",
                "pp2 zb-h1 x4 optimizer=host",
            )
        ),
    ],
)
def test_tensors_at_home_on_the_host_never_meet_those_of_the_card(card, words, method, found, form):
    """Where they do, torch refuses. That moves wait as they must: parallel/test_home_lanes.py."""
    assert card.run(trained, FORMS[form], words, method, None, 0, 2) == [found]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("mutation", ["shares on the card", "rows on the host"])
def test_where_they_meet_torch_refuses(card, mutation):
    (why,) = card.run(trained, FORMS["untied"], f"single x2 {STATES}", BF16, mutation, 0, 2)
    assert "device" in why.lower() and CARD in why and "cpu" in why


# -- mutations -----------------------------------------------------------------------


def down_at_once(lane, source, take):
    take(source, 0, len(source))


def rows_on_the_host(homes, name, index):
    unit = homes.tables[name]
    table = unit.views(unit.weights)[name]
    return table.new_empty(*index.shape, table.shape[1])


def norm_on_the_host(gradients):
    total = sum(float(torch.linalg.vector_norm(flat)) ** 2 for flat in gradients)
    return torch.full((), total, dtype=torch.float64, device=CARD)


def clip_on_the_host(optimizer, gradients, *, norm, limit):
    clip._update_now(optimizer, gradients, norm=norm.item(), limit=limit)


def choose_by_mask(ctx, gradient):
    """The rows of other ranks are left out, not zeroed."""
    (tokens,) = ctx.saved_tensors
    of, whole = ctx.of, ctx.of.region.gather_in(gradient, now=True)()

    def add(out):
        local, elsewhere = tensor._local_rows(tokens, of.first, len(out))
        out.index_add_(0, local[~elsewhere], whole[~elsewhere].to(out.dtype))

    of.weight.add(add)
    return None, None, None


def loss_on_the_host(self, given, loss, *, tokens, train=Executor.train):
    total = train(self, given, loss, tokens=tokens)
    return torch.full((), float(total), device=CARD)


def positions_of_the_host(x, name, *, share, noise):
    positions = torch.arange(x.shape[1]).to(x.device)
    return dropout(x, name, share=share, noise=replace(noise, positions=positions))


def look_at_documents(self, x, positions, documents, *, run=transformer.Transformer.context, **how):
    if bool(documents[1] == positions.shape[1]):
        documents = None
    return run(self, x, positions, documents, **how)


def read_at_once(values, world, *, streams, keep=None, tell=step.tell):
    told = tell(values, world, streams=streams, keep=keep)
    told.values()
    return told


READS, COPIES = "reads a number of the GPU", "copies card and cpu and waits"
MUTATIONS = {
    "norm": [(fake_card, "StepContext", partial(StepContext, square=norm_on_the_host))],
    "clip": [(clip, "_update_unseen", clip_on_the_host)],
    "embedding": [(tensor._VocabEmbedding, "backward", staticmethod(choose_by_mask))],
    "loss": [(Executor, "train", loss_on_the_host)],
    "dropout": [(transformer, "dropout", positions_of_the_host)],
    "documents": [(transformer.Transformer, "context", look_at_documents)],
    "pageable": [(fake_card, "pin", torch.Tensor.clone)],
    "told": [(step, "tell", read_at_once)],
    "shares on the card": [(CardLane, "down", down_at_once)],
    "rows on the host": [(Homes, "fetch_rows", rows_on_the_host)],
}


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("mutation", "sentence"),
    [
        ("norm", f"train/step.py:_square {READS}: aten._local_scalar_dense.default"),
        ("clip", f"optim/clip.py:clipped_update {READS}: aten._local_scalar_dense.default"),
        ("embedding", "asks the GPU for a size (index by a mask): aten.index.Tensor"),
        ("loss", f"train/step.py:accumulate {READS}: aten._local_scalar_dense.default"),
        ("dropout", f"model/transformer.py:embed {COPIES}: aten._to_copy.default"),
        ("documents", f"parallel/stages.py:_context {READS}: aten._local_scalar_dense.default"),
        ("pageable", f"train/feed.py:there {COPIES}: aten._to_copy.default"),
        ("told", "train/tell.py:values waits for an event"),
    ],
)
def test_a_wait_that_is_put_back_is_named(card, mutation, sentence):
    (found,) = card.run(trained, FORMS["laptop"], "tp2", BF16, mutation)
    assert isinstance(found, str) and found.endswith(sentence), found


def mixed(_):
    """For the worker: an operation on tensors of two devices."""
    with fake_card.fake_card() as device:
        try:
            torch.ones(3, device=device) + torch.ones(3)
        except RuntimeError as error:
            return str(error)


def test_tensors_of_two_devices_do_not_mix(card):
    assert "at least two devices, card:0 and cpu" in card.run(mixed)[0]
