"""`howdah.distribute`: every layout of a foreign model equals plain torch on one process."""

import pytest
import torch
from foreign_models import (
    MODELS,
    job_of,
    optimizer_of,
    plain,
    plain_step,
    reader,
    reading_loss,
    texts,
)
from torch import nn

import howdah

SLOW = pytest.mark.slow


def trained(transport, layouts, model, steps, more):
    """For workers: by layout, losses, the whole state, and a verdict of `verify_step`."""
    found = []
    for layout in layouts:
        job, loss_of, batch_of = job_of(transport, model, layout, **more)
        losses = [job.step(loss_of, batch_of(step)) for step in range(steps)]
        verdict = howdah.verify_step(job, loss_of, batch_of(steps))
        found.append((losses, job.state(), verdict))
        job.close()
    return found


def prove(workers, layouts, model="reader", *, steps=3, groups=1, **more):
    """Raises unless losses and weights are those of plain torch, to 1e-10."""
    losses, state = plain(model, steps, groups=groups, **more)
    ranks = int(layouts[0][2])
    for told in workers.run(trained, layouts, model, steps, more, ranks=ranks):
        for layout, (found, whole, verdict) in zip(layouts, told, strict=True):
            assert found == pytest.approx(losses, rel=1e-10), layout
            assert verdict.equal, str(verdict)
            for name, tensor in state.items():
                if "running" not in name and "tracked" not in name:
                    torch.testing.assert_close(whole[name], tensor, rtol=1e-9, atol=1e-10, msg=name)


def test_every_stage_on_two_processes(workers):
    prove(workers, ["dp2", "dp2 zero1", "dp2 zero2", "dp2 zero3"])


def test_micro_batches_and_recomputation(workers):
    layouts = ["dp2 x2 recompute=full", "dp2 zero2 x3", "dp2 zero3 x2 recompute=full"]
    prove(workers, layouts)


@SLOW
@pytest.mark.parametrize("recompute", ["", " recompute=full"])
@pytest.mark.parametrize("micros", ["x1", "x2"])
def test_stages_micro_batches_and_recomputation_in_all_combinations(workers, micros, recompute):
    stages = ["", "zero1", "zero2", "zero2 accumulate=whole", "zero3", "zero3 release=step"]
    prove(workers, [f"dp3 {stage} {micros}{recompute}" for stage in stages])


@SLOW
def test_copies_of_shares_and_gathering_by_broadcast(workers):
    prove(workers, ["dp4 zero2 shard2 x2", "dp4 zero3 shard2", "dp4 zero3 gather=broadcast"])


@SLOW
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("SGD", {"momentum": 0.9, "nesterov": True}),
        ("Adam", {"amsgrad": True}),
        ("RMSprop", {"momentum": 0.5, "centered": True}),
        *((kind, {}) for kind in ("NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "ASGD")),
    ],
)
def test_every_elementwise_optimizer_runs_on_shares(workers, kind, settings):
    more = {"initial_accumulator_value": 0.1} if kind == "Adagrad" else settings
    prove(workers, ["dp2 zero1", "dp2 zero3"], kind=kind, **more)


def test_momentum_and_adagrad_run_on_shares(workers):
    prove(workers, ["dp2 zero2"], kind="SGD", momentum=0.9, steps=4)
    prove(workers, ["dp2 zero3"], kind="Adagrad", initial_accumulator_value=0.1)


def gone_on(transport, layout, kind, settings):
    """For workers: losses of two steps of torch alone, and of two on a layout."""
    net = reader()
    optimizer = optimizer_of(kind, net, **settings)
    losses = [plain_step("reader", net, optimizer, step) for step in range(2)]
    more = {"units": ["blocks.*", "lstm"], "clip": 0.5, "transport": transport}
    job = howdah.distribute(net, optimizer, layout, **more)
    losses += [job.step(reading_loss(net), texts(step)) for step in (2, 3)]
    job.close()
    return losses


@pytest.mark.parametrize("case", [("AdamW", {}), ("SGD", {"momentum": 0.9})], ids=str)
def test_an_optimizer_that_has_made_steps_goes_on(workers, case):
    losses, _ = plain("reader", 4, kind=case[0], **case[1])
    for found in workers.run(gone_on, "dp2 zero3", *case, ranks=2):
        assert found == pytest.approx(losses, rel=1e-10)


def test_a_batch_norm_equals_one_process_on_the_same_groups_of_rows(workers):
    layouts = ["dp2 x2", "dp2 zero3 x2 recompute=full"]
    prove(workers, layouts, "pictures", groups=4, kind="SGD", momentum=0.9)


def running_means(transport, layout):
    job, loss_of, batch_of = job_of(transport, "pictures", layout)
    job.step(loss_of, batch_of(0))
    found = {k: v for k, v in job.state().items() if "running" in k or "tracked" in k}
    job.close()
    return found


def test_statistics_are_means_over_processes_and_counted_once_under_recomputation(workers):
    one, two = (running_means_of(rows) for rows in (slice(0, 4), slice(4, 8)))
    for layout in ("dp2", "dp2 recompute=full"):
        for found in workers.run(running_means, layout, ranks=2):
            for name, tensor in found.items():
                expected = (one[name] + two[name]) / 2
                torch.testing.assert_close(tensor.double(), expected.double())


def running_means_of(rows):
    make, loss_of, batch_of = MODELS["pictures"]
    net = make()
    loss_of(net)(*(part[rows] for part in batch_of(0)))
    return dict(net.named_buffers())


def sent_and_predicted(transport, layouts, model):
    """For workers: by layout, the bytes of the second step as counted and as the outline says."""
    found = []
    for layout in layouts:
        job, loss_of, batch_of = job_of(transport, model, layout)
        job.step(loss_of, batch_of(0))
        plan, before = job.plan(), job.laid.mesh.counters.sent()
        job.step(loss_of, batch_of(1))
        after = job.laid.mesh.counters.sent()
        counted = {row: count - before.get(row, 0) for row, count in after.items()}
        found.append(({row: n for row, n in counted.items() if n}, plan.sent))
        job.close()
    return found


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("model", ["reader", "pictures"])
def test_predicted_bytes_are_those_that_are_counted(workers, model):
    layouts = ["dp2 x2", "dp2 zero1", "dp2 zero2 x2", "dp2 zero3 x2 recompute=full"]
    for told in workers.run(sent_and_predicted, layouts, model, ranks=2):
        for counted, predicted in told:
            assert counted == predicted


def broken(transport, breaks):
    """For workers: the verdict on a job of which something is broken."""
    job, loss_of, batch_of = job_of(transport, "reader", "dp2 zero2 x2")
    if breaks == "a sum is skipped":
        job.laid.sums.skipped.add(0)
    verdict = howdah.verify_step(job, loss_of, batch_of(0))
    job.close()
    return verdict


def test_a_sum_that_is_skipped_is_noticed(workers):
    for verdict in workers.run(broken, "a sum is skipped", ranks=2):
        assert not verdict.equal
        assert "DIFFERS" in str(verdict)
    assert all(verdict.equal for verdict in workers.run(broken, "nothing", ranks=2))


def of_two_dtypes(transport, layout):
    """For workers: losses of a model in bf16 whose norms are float32."""
    net = reader(torch.bfloat16)
    for module in net.modules():
        if isinstance(module, nn.LayerNorm):
            module.float()
            module.register_forward_pre_hook(lambda _, given: (given[0].float(),))
            module.register_forward_hook(lambda _, __, out: out.bfloat16())
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.01)
    units = ["blocks.*", "lstm"]
    job = howdah.distribute(net, optimizer, layout, units=units, transport=transport)
    losses = [job.step(reading_loss(net), texts(step)) for step in range(4)]
    dtypes = {unit.weights.dtype for unit in job.laid.units.values()}
    masters = {unit.masters.dtype for unit in job.laid.units.values()}
    job.close()
    return losses, dtypes, masters


def test_parameters_of_several_dtypes_have_float32_masters(workers):
    alone, dtypes, masters = of_two_dtypes(None, "single")
    assert dtypes == {torch.bfloat16, torch.float32}
    assert masters == {torch.float32}
    for layout in ("dp2 zero1", "dp2 zero3"):
        for losses, *_ in workers.run(of_two_dtypes, layout, ranks=2):
            assert losses == pytest.approx(alone, rel=2e-2)


def means_by_hand(job, loss_of, tokens, labels):
    """A step of micro-batches with as many rows each, of which each gives its mean."""
    with job.accumulating(5):
        for some in zip(tokens.split(1), labels.split(1), strict=True):
            with job.forward():
                loss = loss_of(*some)
            job.backward(loss)
    return job.update()


def by_hand(transport, layout):
    """For workers: a loss that is a sum and a number, micro-batch by micro-batch; an inference."""
    job, loss_of, batch_of = job_of(transport, "reader", layout)
    losses = []
    for step in range(3):
        tokens, labels = (part.chunk(job.layout.replicas)[job.rank] for part in batch_of(step))
        if step == 1:
            losses.append(means_by_hand(job, loss_of, tokens, labels))
            continue
        with job.accumulating(2):
            for some in zip(tokens.split([2, 3]), labels.split([2, 3]), strict=True):
                with job.forward():
                    loss = loss_of(*some)
                job.backward((loss * len(some[0]), len(some[0])))
        losses.append(job.update())
    with job.inference() as model:
        first, second = (float(loss_of(*batch_of(9))) for _ in range(2))
    assert first == second
    mine = tuple(part.split([3, 7])[job.rank] for part in batch_of(3))
    losses.append(job.step(loss_of, mine, mine=True))
    state = job.state()
    fresh = reader()
    fresh.load_state_dict(state)
    with torch.no_grad():
        assert float(reading_loss(fresh)(*batch_of(9))) != first
    job.close()
    assert type(model).__name__ == "Reader"
    return losses


@pytest.mark.parametrize("layout", ["dp2 zero1", "dp2 zero3"])
def test_micro_batches_by_hand_and_inference(workers, layout):
    losses, _ = plain("reader", 4)
    for found in workers.run(by_hand, layout, ranks=2):
        assert found == pytest.approx(losses, rel=1e-10)


class Branch(nn.Module):
    """A layer that only some rows use."""

    def __init__(self):
        super().__init__()
        self.always, self.sometimes = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.always(x)
        return (self.sometimes(x) if x.sum() > 0 else x).square().mean()


def branching(transport, layout):
    """For workers: losses of rows of which one half takes a branch."""
    torch.manual_seed(1)
    net = Branch()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    job = howdah.distribute(net, optimizer, layout, transport=transport)
    rows = torch.cat([torch.ones(2, 4), -torch.ones(2, 4)])
    losses = [job.step(net, rows) for _ in range(4)]
    job.close()
    return losses


@pytest.mark.parametrize("stage", ["", " zero1", " zero2"])
def test_a_branch_that_one_process_takes(workers, stage):
    alone = branching(None, "single x2")
    for losses in workers.run(branching, f"dp2{stage}", ranks=2):
        assert losses == pytest.approx(alone, rel=1e-5)
