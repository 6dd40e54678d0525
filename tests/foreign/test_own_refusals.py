"""What a foreign model cannot have, and other mistakes: one sentence each, before a step."""

import math

import pytest
import torch
from foreign_models import BUFFERS, Reader, drawn, job_of, picture_loss, pictures, reader
from torch import nn
from torch.nn import functional as F

import howdah
from howdah.base.errors import UserError
from howdah.foreign.units import choose_units


def refused(net, layout="single", *, optimizer=None, **more):
    if optimizer is None:
        optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad])
    with pytest.raises(UserError) as told:
        howdah.distribute(net, optimizer, layout, **more)
    return str(told.value)


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        ("tp2", "tp2 cuts matrices, and howdah does not know which matrices"),
        ("dp2 tp2 sp", "tp2 cuts matrices"),
        ("pp2", "pp2 cuts a model into stages"),
        ("cp2", "cp2 cuts sequences"),
        ("dp2 ep2", "ep2 divides experts"),
        ("dp2 server1", "server1 needs howdah train"),
        ("dp2 recompute=selective", "use recompute=full"),
        ("dp2 recompute=full:1", 'said by units=["layers.3", ...]'),
        ("dp2 zero1 optimizer=host", "optimizer=host moves what howdah's own operations use"),
        ("dp2 zerro1", "unknown word 'zerro1'"),
        ("dp2", "needs 2 processes but there are 1"),
    ],
)
def test_words_of_a_layout_that_need_howdahs_own_models(layout, says):
    assert says in refused(reader(), layout)


def test_lazy_weights_have_no_shape_yet():
    net = nn.Sequential(nn.LazyLinear(3), nn.ReLU())
    assert "0.weight is lazy and has no shape yet; run the model once" in refused(net)
    net(torch.zeros(2, 5))
    howdah.distribute(net, torch.optim.AdamW(net.parameters()), "single").close()


class Halves(torch.optim.Optimizer):
    """One that is elementwise, and not torch's."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * p.grad.sign())


class Normed(Halves):
    """One that looks at the whole of a parameter."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * p.grad / p.grad.norm())


class Odd(Halves):
    """One that cannot be built again."""

    def __init__(self, params, name):
        super().__init__(params)


def test_optimizers_that_look_at_more_than_an_element():
    net = nn.Linear(4, 4)
    for kind, says in (
        (torch.optim.LBFGS, "LBFGS searches along a direction of all parameters"),
        (torch.optim.Adafactor, "Adafactor keeps sums over rows and columns"),
        (torch.optim.SparseAdam, "SparseAdam takes sparse gradients"),
        (Normed, "Normed updates a part of a matrix in another way than the whole"),
    ):
        assert says in refused(net, optimizer=kind(net.parameters()))
    if hasattr(torch.optim, "Muon"):
        muon = torch.optim.Muon([net.weight])
        assert "Muon makes each matrix orthogonal" in refused(net, optimizer=muon)
    odd = Odd(net.parameters(), "x")
    assert "Odd could not be tried on shares" in refused(net, optimizer=odd)
    assert howdah.distribute(net, Halves(net.parameters()), "single").steps == 0


def test_optimizers_of_other_parameters():
    net, other = nn.Linear(4, 4), nn.Linear(4, 3)
    told = refused(net, optimizer=torch.optim.SGD(other.parameters()))
    assert "has a parameter of shape [3, 4] that is none of this model's" in told
    told = refused(net, optimizer=torch.optim.SGD([net.weight]))
    assert "lacks the parameter bias; give it, or freeze it" in told
    still = nn.Linear(2, 2).requires_grad_(False)
    told = refused(still, optimizer=torch.optim.SGD(still.parameters()))
    assert "no parameter of the model is trained" in told


def test_buffers_are_declared():
    assert "do with the buffer grid and 6 more; say buffers=" in refused(pictures())
    told = refused(pictures(), buffers={"*": "average"})
    assert "'average' is no rule; known are: constant, local, mean, rank 0" in told
    told = refused(pictures(), buffers={"*": "mean", "gird": "constant"})
    assert "no buffer is called 'gird'; did you mean 'grid'?" in told
    net = pictures()
    optimizer = torch.optim.SGD(net.parameters())
    job = howdah.distribute(net, optimizer, "single", buffers={"*": "constant"})
    with pytest.raises(UserError, match="declared constant, and this step has changed it"):
        job.step(picture_loss(net), drawn(0))


def test_units_that_are_none():
    net = Reader()
    assert "no submodule is called 'block.*'" in refused(net, units=["block.*"])
    told = refused(net, units=["blocks"])
    assert "blocks is a ModuleList, which the model does not call; name what is in it" in told
    assert "blocks.0.up is inside of blocks.0" in refused(net, units=["blocks.0", "blocks.0.up"])


def test_units_are_found_where_none_are_named():
    assert choose_units(Reader(), None) == ["embedding", *(f"blocks.{n}" for n in range(3)), "lstm"]
    tied = Reader()
    tied.head = nn.Linear(8, 13, bias=False)
    tied.head.weight = tied.embedding.weight
    assert choose_units(tied, None) == [*(f"blocks.{n}" for n in range(3)), "lstm"]
    layers = nn.Sequential(*(nn.TransformerEncoderLayer(8, 2, 16) for _ in range(2)))
    assert choose_units(layers, None) == ["0", "1"]
    both = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)
    names = ["encoder.layers.0", "encoder.norm", "decoder.layers.0", "decoder.norm"]
    assert choose_units(both, None) == names
    assert choose_units(nn.Linear(2, 2), None) == []
    lists = nn.ModuleList([nn.ModuleList([nn.Sequential(nn.Linear(2, 2))]), nn.Linear(2, 2)])
    assert choose_units(nn.Sequential(lists), None) == ["0.0.0", "0.1"]


def test_other_mistakes_in_the_call():
    net = nn.Linear(2, 2)
    assert "takes a torch.nn.Module and a torch.optim" in refused(net, optimizer=[])
    assert "clip is 0; give a norm above 0" in refused(net, clip=0)
    assert "is a DataParallel; give the module inside of it" in refused(nn.DataParallel(net))
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    assert "float64 beside others: 0.bias (torch.float32) and 1.bias" in refused(mixed)
    meta = nn.Linear(2, 2, device="meta")
    assert "meta device and has no weights" in refused(meta)
    both = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    assert "on several devices: 0.bias on cpu and 1.bias on meta" in refused(both)
    assert "clip is 'a'; give a norm" in refused(net, clip="a")
    assert "layout is None; give words such as" in refused(net, None)
    assert "buffers is ['a']; give rules by pattern" in refused(net, buffers=["a"])
    assert "units is 'blocks.*'; give a list of paths" in refused(Reader(), units="blocks.*")
    with pytest.raises(UserError, match=r"takes the job that howdah.distribute has returned"):
        howdah.verify_step(net, net, torch.ones(2, 2))
    waves = nn.Linear(2, 2, dtype=torch.complex64)
    assert "weight is of torch.complex64" in refused(waves).replace("bias", "weight")


def mistaken(job, loss_of, batch, **more):
    with pytest.raises(UserError) as told:
        job.step(loss_of, batch, **more)
    return str(told.value)


def test_mistakes_in_a_step():
    def fresh():
        net = nn.Linear(2, 2)
        return howdah.distribute(net, torch.optim.SGD(net.parameters()), "single x3"), net

    job, net = fresh()
    x = torch.ones(6, 2)
    assert "2 rows is too small for 1 processes with 3" in mistaken(job, net, x[:2])
    assert "the batch 'int' has no tensor" in mistaken(job, net, 3)
    assert "different numbers of rows" in mistaken(job, net, (x, x[:1]))
    assert "the loss is no scalar tensor" in mistaken(job, net, x)
    with pytest.raises(UserError, match="3 of 3 micro-batches had no"), job.accumulating():
        pass
    with pytest.raises(UserError, match="is called inside of `with"):
        job.backward(net(x).sum())
    with pytest.raises(UserError, match="micros is 0; give the number"), job.accumulating(0):
        pass
    job, net = fresh()
    before = job.state()
    assert "the loss is 3 things" in mistaken(job, lambda x: (net(x).sum(), 1, 2), x)
    assert "the loss is 2 things" in mistaken(job, lambda x: (net(x).sum(), "1"), x)
    assert "add up to 0 over the whole batch" in mistaken(job, lambda x: (net(x).sum(), 0), x)
    assert "add up to -3 over" in mistaken(job, lambda x: (net(x).sum(), -1), x)
    given = iter([2, None, None])

    def of_both(x):
        number = next(given)
        return net(x).mean() if number is None else (net(x).sum(), number)

    assert "others a pair (sum, number)" in mistaken(job, of_both, x)
    assert all(torch.equal(before[name], now) for name, now in job.state().items())
    assert (job.steps, job.seen) == (0, 0)
    job.step(lambda x: net(x).mean(), x)
    assert (job.steps, job.seen) == (1, 6)


def test_habits_of_a_plain_loop_are_told():
    net = nn.Linear(2, 2)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    job, x = howdah.distribute(net, sgd, "single"), torch.ones(2, 2)
    job.step(lambda x: net(x).mean(), x)
    before = job.state()
    with pytest.raises(UserError, match=r"job.step or job.update does that already.*drop the call"):
        sgd.step()
    with pytest.raises(UserError, match=r"job.update is called once, after"):
        job.update()
    assert all(torch.equal(before[name], now) for name, now in job.state().items())
    assert "another job trains weight; close that job" in refused(net)
    net.bias.requires_grad_(False)
    assert "bias is frozen since howdah.distribute" in mistaken(job, lambda x: net(x).mean(), x)
    net.bias.requires_grad_(True)
    job.close()
    assert "this job is closed" in mistaken(job, lambda x: net(x).mean(), x)
    again = torch.optim.SGD(net.parameters(), lr=0.1)
    howdah.distribute(net, again, "single").step(lambda x: net(x).mean(), x)
    sgd.step()  # nobody's any more


def test_a_gradient_that_is_not_finite_changes_nothing():
    net = nn.Linear(2, 1)
    job = howdah.distribute(net, torch.optim.SGD(net.parameters(), lr=0.1), "single")
    before = job.state()
    loss = job.step(lambda x: net(x).sum() * math.inf, torch.ones(2, 2))
    assert not math.isfinite(loss)
    assert (job.steps, job.skipped) == (1, 1)
    assert all(torch.equal(before[name], x) for name, x in job.state().items())


def test_dropout_is_not_compared():
    net = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    job = howdah.distribute(net, torch.optim.SGD(net.parameters()), "single")
    with pytest.raises(UserError, match="1 drops elements by torch's random numbers"):
        howdah.verify_step(job, lambda x: net(x).mean(), torch.ones(2, 2))
    net.eval()
    assert howdah.verify_step(job, lambda x: net(x).mean(), torch.ones(2, 2)).equal


class Lookup(nn.Module):
    """Uses the weight of a layer that it does not call."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Embedding(5, 8), nn.Linear(8, 2)

    def forward(self, numbers):
        return self.down(F.embedding(numbers, self.up.weight)).mean()


def looked_up(transport):
    net = Lookup()
    optimizer = torch.optim.SGD(net.parameters())
    job = howdah.distribute(net, optimizer, "dp2 zero3", transport=transport)
    try:
        job.step(net, torch.arange(4))
    except UserError as error:
        return str(error)


def outside(transport, what):
    """For workers: the sentence about a use of weights outside of their time."""
    if what == "not called":
        return looked_up(transport)
    units = ["blocks.*", "lstm"] if what != "tied by use" else None
    job, loss_of, batch_of = job_of(transport, "reader", "dp2 zero3", units=units)
    try:
        if what == "tied by use":
            job.step(loss_of, batch_of(0))
        elif what == "no pass":
            loss_of(*batch_of(0))
        elif what == "state_dict":
            job.model.state_dict()
        elif what.startswith("closed"):
            job.close()
            if what.endswith("again"):
                howdah.distribute(job.model, torch.optim.SGD(job.model.parameters()), "single")
            job.model.state_dict()
        elif what == "failed":
            with pytest.raises(UserError):
                job.step(lambda *rows: 3, batch_of(0))
            job.step(loss_of, batch_of(0))
        elif what == "order":
            job.step(loss_of, batch_of(0))
            job.model.blocks = job.model.blocks[::-1]
            job.step(loss_of, batch_of(1))
    except UserError as error:
        return str(error)
    finally:
        job.close()
    return "nothing was said"


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("tied by use", "embedding.weight is used outside of the forward pass of its unit embed"),
        ("no pass", "blocks.0 runs outside of a step, and under zero3 its weights are shared out"),
        ("state_dict", "model.state_dict() has no whole weights under zero3; take job.state()"),
        ("order", "must use its weights in one order"),
        ("not called", "the first loss is not finite, and up has not run: if the model uses its"),
        (
            "closed",
            "state_dict() has no whole weights under zero3; take job.state(), on every proc",
        ),
        ("closed, again", "share memory, as those of a closed zero3 job do; build the model again"),
        ("failed", "an earlier step of this job failed (UserError); build it again"),
    ],
)
def test_zero3_says_what_is_used_outside_of_its_time(workers, what, says):
    for told in workers.run(outside, what, ranks=2):
        assert says in told


def of_other_models(transport):
    net = nn.Linear(2, 2 + transport.rank)
    try:
        howdah.distribute(net, torch.optim.SGD(net.parameters()), "dp2", transport=transport)
    except UserError as error:
        return str(error)


def test_processes_have_one_model(workers):
    for told in workers.run(of_other_models, ranks=2):
        assert "process 1 has another model, layout, units or groups" in told


def of_other_settings(transport, what):
    """For workers: the sentence about processes that do not call alike, or the rows seen."""
    rank, net = transport.rank, nn.Linear(2, 2)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1 * (1 + rank * (what == "rate")))
    clip = 1.0 if what == "clip" and rank else None
    try:
        job = howdah.distribute(net, sgd, "dp2", clip=clip, transport=transport)
        job.step(lambda x: net(x).mean(), torch.ones(4 + 2 * rank, 2), mine=what == "own rows")
        seen = job.seen
        job.close()
        return seen
    except UserError as error:
        return str(error)


def test_processes_have_the_same_settings_and_batches(workers):
    for what in ("rate", "clip"):
        for told in workers.run(of_other_settings, what, ranks=2):
            assert "process 1 has another optimizer than process 0, another rate or other" in told
    one, two = workers.run(of_other_settings, "rows", ranks=2)
    assert "batches of different numbers of rows (4 here, 5 on average)" in one
    assert "(6 here, 5 on average); give all the same batch, or each its own" in two
    assert workers.run(of_other_settings, "own rows", ranks=2) == [10, 10]


def of_other_worlds(transport, layout):
    net = nn.Linear(2, 2)
    try:
        howdah.distribute(net, torch.optim.SGD(net.parameters()), layout, transport=transport)
    except UserError as error:
        return str(error)


def test_the_world_has_the_size_of_the_layout(workers):
    for told in workers.run(of_other_worlds, "dp3 zero1", ranks=2):
        assert "layout 'dp3 zero1' needs 3 processes but there are 2" in told


def test_a_model_in_training_and_in_evaluation(workers):
    """Buffers and hooks do not hinder a use outside of a job."""
    net = pictures()
    job = howdah.distribute(net, torch.optim.SGD(net.parameters()), "single", buffers=BUFFERS)
    job.step(picture_loss(net), drawn(0))
    with job.inference() as model:
        model.eval()
        assert F.cross_entropy(model(drawn(1)[0]), drawn(1)[1]).isfinite()
    assert list(job.state()) == list(net.state_dict())
