"""`howdah measure`: what is timed, the values that follow, the files, and who uses them.

No time decides anything: values are fitted to seconds that the simulator made up from known ones,
and ranks measure with tiny sizes, so that only what they find at all is looked at.
"""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from howdah.base.errors import UserError
from howdah.bench import machine
from howdah.bench.fitting import EMPTY, Fit, nonnegative
from howdah.bench.machine import (
    COPIED,
    GROUPS,
    MESSAGES,
    PRECISIONS,
    PRODUCTS,
    Wanted,
    counts_of,
    machine_of,
    profile_of_rounds,
    profiles,
    rate_of,
    rates_of,
    round_of,
)
from howdah.bench.machine_files import cluster_text, profile_text, write_files
from howdah.bench.probes import PARTS, medians, name_of
from howdah.bench.small_models import model_of, shared_models
from howdah.host.facts import cpu_model
from howdah.machines.cluster import Link
from howdah.machines.cluster_file import CLUSTERS, load_cluster
from howdah.model.loss import CHUNK
from howdah.plan.batch import Batch
from howdah.plan.layout import parse_layout, resolve
from howdah.plan.plan import make_plan
from howdah.plan.schedule.actions import Kind
from howdah.shapes.part import Part
from howdah.sim.measured import Facts, profile_for, read_measured
from howdah.sim.predict import predict
from howdah.sim.profile import Kernel
from howdah.sim.step_time import step_time
from howdah.train.report import compare_time, predicted_time

BANDWIDTH = 20e9
KNOWN = replace(
    EMPTY,
    products=(
        Kernel(1e-5, 9e10, m0=30.0, n0=8.0, k0=12.0),
        Kernel(2e-5, 8e10, m0=20.0, n0=5.0, k0=3.0),
        Kernel(3e-5, 7e10, m0=90.0, n0=40.0, k0=20.0),
    ),
    pairs=(Kernel(9e-5, 8e10, m0=100.0, k0=50.0), Kernel(3e-4, 6e10, n0=6e4, k0=9.0)),
    forward=7e-4,
    backward=1.3e-3,
    stream=9.0,
    activation=4.0,
    heads=6.0,
    again=0.75,
    end_forward=4e-5,
    end_backward=9e-5,
    logits=16.0,
    loss=0.7,
    norm=5.0,
    table=2.5,
    step=1e-3,
    action=4e-4,
    update=2.0,
    chunk=CHUNK,
)
LOSING = replace(KNOWN, meet=3e-4, uneven=0.07)  # of ranks that wait for each other
FACTS = Facts("here", "2026-11-23", ranks=2, threads=1, cpu='A "B" CPU', torch="2.13.0+cpu")


def made_up(precision, known=KNOWN):
    """The seconds of a round on a machine of which the profile is known."""
    wanted, cluster = round_of(precision, 1, 0.0), machine._cluster(precision, BANDWIDTH)
    fit, found = Fit(cluster, known), {"copy": (2 * COPIED / BANDWIDTH,)}
    for rows, inner, columns in PRODUCTS:
        work = 2.0 * rows * inner * columns
        times = (one.seconds(work, rows, inner, columns) for one in known.products)
        found[name_of("product", rows, inner, columns)] = tuple(times)
    for rows, heads, keys, size in wanted.pairs:
        work = 2.0 * rows * heads * keys**2 * size
        times = (one.seconds(work, keys, size, keys * size) for one in known.pairs)
        found[name_of("pairs", rows, heads, keys, size)] = tuple(times)
    for number, plan in enumerate(wanted.parts):
        cut = Part("embedding"), Part("layers", 0), Part("head")
        for part, one in zip(PARTS, cut, strict=True):
            times = fit._part(plan, one, replace(known, action=0.0))
            ways = (Kind.FORWARD, Kind.BACKWARD)
            found[name_of(part, number)] = tuple(map(times.seconds, ways))
    for number, plan in enumerate(wanted.steps):
        found[name_of("steps", number)] = (step_time(plan, cluster, known).seconds,)
    return wanted, found


def shared(precision, ranks, known):
    """The seconds of models that ranks share, on two cores; all take 10 % more than predicted."""
    wire = dict.fromkeys(("inside", "between"), Link("engine", 6e9, 4e-5))
    cluster = replace(machine._cluster(precision, BANDWIDTH), devices_per_node=ranks, **wire)
    known = replace(known, waits=2.0, crowd=max(ranks / 2, 1.0))
    one, models = machine._cluster(precision, BANDWIDTH), shared_models(precision, ranks)
    found = {}
    for number, (plan, _) in enumerate(models):
        found[name_of("together", number)] = (1.1 * step_time(plan, cluster, known).seconds,)
    for number, plan in enumerate(dict.fromkeys(alone for _, alone in models)):
        found[name_of("alone", number)] = (1.1 * step_time(plan, one, KNOWN).seconds,)
    return found


def a_group(ranks, *, latency, bandwidth):
    """The seconds of a group's operations, by the formulas of the simulator."""
    times, shared = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}, (ranks - 1) / ranks
    found = {}
    for name in GROUPS:
        for size in MESSAGES:
            each = (ranks - 1) * latency + shared * size / bandwidth
            both = latency + size / bandwidth
            found[name_of(name, size)] = (times[name] * each if name in times else both,)
    return found


# -- values ----------------------------------------------------------------------------


@pytest.mark.parametrize("precision", PRECISIONS)
def test_known_values_are_found_again(precision):
    """Every value of a profile, from the seconds that it gives."""
    wanted, found = made_up(precision)
    profile = profile_of_rounds(wanted, found, BANDWIDTH)
    for name in ("products", "pairs"):
        for one, known in zip(getattr(profile, name), getattr(KNOWN, name), strict=True):
            assert vars(one) == pytest.approx(vars(known), rel=1e-3, abs=1e-9)
    for name, value in vars(KNOWN).items():
        if isinstance(value, float):
            assert getattr(profile, name) == pytest.approx(value, rel=1e-3), name


def test_no_value_is_negative():
    fitted = nonnegative([[1.0, 1.0, 1.0], [1.0, 2.0, 4.0]], [1.0, 2.0, 4.0])
    assert fitted == pytest.approx([0.0, 1.0])
    fitted = nonnegative([[1.0, 1.0, 1.0], [1.0, 2.0, 3.0]], [3.0, 2.0, 1.0])
    assert fitted[1] == 0 < fitted[0]


def test_a_mistake_counts_by_its_share_of_the_whole():
    """A microsecond of a long time is not worth one of a short one."""
    terms, rest = [[1.0, 1.0]], [1.0, 2.0]
    assert nonnegative(terms, rest, [1.0, 1000.0]) == pytest.approx([1.0], rel=1e-3)
    assert nonnegative(terms, rest, [1000.0, 1.0]) == pytest.approx([2.0], rel=1e-3)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_group_is_a_latency_and_a_bandwidth(ranks):
    found = a_group(ranks, latency=4e-5, bandwidth=6e9)
    assert rates_of(found, ranks) == pytest.approx((6e9, 4e-5))


def test_one_disturbed_round_does_not_count():
    calm, spread = medians([{"a": (1.0,)}, {"a": (9.0,)}, {"a": (1.1,)}])
    assert calm == {"a": (1.1,)}
    assert spread["a"] > 1
    assert rate_of([1.0, 9.0, 1.1]).median == 1.1
    assert rate_of([3.0]).spread == 0


def test_numbers_of_ranks_are_near_to_each_other():
    assert counts_of(2, 4) == (1, 2, 4)
    assert counts_of(6, 6) == (1, 2, 4, 6)
    assert counts_of(2, 3) == (1, 2, 3)
    assert counts_of(8, 1) == (1,)
    wanted = Wanted((1, 2, 4), 2)
    assert [*map(wanted.threads, wanted.counts)] == [2, 1, 1]


def test_ranks_of_several_machines_have_two_groups():
    wanted = Wanted((8,), cores=4, nodes=2, kinds=("torch",))
    assert wanted.threads(8) == 1
    assert wanted.wires(8) == ("torch", "local")
    rounds = {name: [made_up(name)[1]] for name in PRECISIONS}
    slow, fast = (a_group(n, latency=5e-5, bandwidth=b) for n, b in ((8, 1e9), (4, 9e9)))
    found = machine.Found(rounds, {"torch": [slow], "local": [fast]})
    facts = replace(FACTS, ranks=8)
    one = machine_of(wanted, 8, found, facts=facts, memory=1 << 34, disk=(1, rate_of([1e9])))
    assert {link: round(wire.bandwidth.median / 1e9) for link, wire in one.links.items()} == {
        "inside": 9,
        "between": 1,
    }


# -- files -------------------------------------------------------------------------------


@pytest.fixture
def own(tmp_path):
    """A cache in which this machine was measured with 1, 2 and 4 ranks on 2 cores."""
    folder, wanted = tmp_path / "howdah" / CLUSTERS, Wanted((1, 2, 4), 2, kinds=("engine", "torch"))
    for ranks in wanted.counts:
        rounds = {p: [made_up(p)[1] | shared(p, ranks, LOSING)] for p in PRECISIONS}
        groups = {
            kind: [a_group(ranks, latency=4e-5, bandwidth=rate)]
            for kind, rate in (("engine", 6e9), ("torch", 1e9))[: 2 * (ranks > 1)]
        }
        found = machine.Found(rounds, groups)
        facts = replace(FACTS, ranks=ranks, threads=wanted.threads(ranks))
        disk = 10**12, rate_of([4e8])
        one = machine_of(wanted, ranks, found, facts=facts, memory=24 << 30, disk=disk)
        texts = cluster_text(one), profile_text(facts, profiles(wanted, ranks, found))
        write_files(folder, ranks, texts, usual=ranks == 2)
    return folder


def plan_on(words, precision="bf16", micro=4):
    alone = model_of(precision, (256, 4, 2, 640, 4096, 4, 256), layers=2)
    layout, batch = resolve(parse_layout(words), None), Batch(micro_batch=micro)
    return make_plan(alone.shape, layout, batch, sequence=256, method=alone.method)


def test_what_was_measured_is_read_back(own):
    cluster = load_cluster("here", own=own)
    assert (cluster.devices, cluster.inside.name) == (2, "engine")
    assert cluster.device.memory == (24 << 30) // 2
    measured = dict(cluster.measured)
    assert measured["inside.bandwidth"] == pytest.approx(6e9, rel=1e-4)
    assert measured["inside.latency"] == pytest.approx(4e-5, rel=1e-4)
    assert measured["device.bandwidth"] == pytest.approx(BANDWIDTH, rel=1e-4)
    facts, profile = read_measured(own / "here-2.profile.toml", "bf16")
    assert facts == FACTS
    assert profile.adds
    assert (profile.forward, profile.chunk) == (pytest.approx(7e-4, rel=1e-3), CHUNK)
    four = load_cluster("herex4", own=own)
    assert profile_for(four, plan_on("dp4").method).crowd == 2
    assert (own / "here-1.toml").is_file()


def test_a_plan_uses_both(own):
    """The prediction is that of the known profile on the known wire."""
    plan, cluster = plan_on("dp2 zero1 x2"), load_cluster("here", own=own)
    time = predict(plan, cluster).time
    assert time.profile.name == "here"
    known = replace(LOSING, waits=2.0)
    flat = replace(machine._cluster("bf16", BANDWIDTH), devices_per_node=2)
    wire = replace(flat.inside, bandwidth=6e9, latency=4e-5)
    expected = step_time(plan, replace(flat, inside=wire, between=wire), known).seconds
    assert time.seconds == pytest.approx(expected, rel=1e-2)
    assert sum(time.breakdown.values()) == pytest.approx(time.seconds)
    assert time.breakdown["host"] > 0


def test_what_waiting_ranks_lose_is_found(own):
    """Of ranks on cores of their own, and of more ranks than cores; one rank waits for nobody."""
    for ranks, meet, uneven in ((1, 0.0, 0.0), (2, 3.3e-4, 0.07), (4, 3.3e-4, 0.07)):
        for precision in PRECISIONS:
            profile = read_measured(own / f"here-{ranks}.profile.toml", precision)[1]
            assert profile.meet == pytest.approx(meet, rel=0.1)
            assert profile.uneven == pytest.approx(uneven, rel=0.1)
    plan, cluster = plan_on("tp2"), load_cluster("here", own=own)
    lost = predict(plan, cluster).time.seconds
    assert step_time(plan, cluster, replace(KNOWN, waits=2.0)).seconds < 0.93 * lost


def test_ranks_that_wait_lend_their_core(own):
    """Stages on half as many cores: they compute as long, and the bubble takes half as long."""
    plan = plan_on("pp3 x4", micro=1)
    cluster, slow = load_cluster("herex4", own=own), replace(KNOWN, crowd=2.0)
    alone = step_time(plan, cluster, KNOWN)
    busy = sum(alone.timeline.busy) / 3
    lent = step_time(plan, cluster, slow)
    assert busy < lent.seconds - KNOWN.step < alone.timeline.makespan
    assert lent.seconds - KNOWN.step == pytest.approx((busy + alone.timeline.makespan) / 2)
    assert sum(lent.breakdown.values()) == pytest.approx(lent.seconds)


def test_the_head_makes_again_what_it_does_not_keep(own):
    cluster = machine._cluster("bf16", BANDWIDTH)
    few, many = plan_on("single", micro=8), plan_on("single", micro=16)
    again = [Fit(cluster, KNOWN)._part(plan, Part("head"), KNOWN).again for plan in (few, many)]
    assert again[0] == 0 < again[1]  # 2,048 and 4,096 tokens


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("forward = {value", "forwards = {value", "forwards"),
        ("table = {value = ", "table = {value = -", "table is -2.5"),
        ("crowd = {value = 1", "crowd = {value = 0", "crowd is 0"),
        ("ranks = 2", 'ranks = "two"', "ranks"),
        ("[bf16]", "[fp4]", "has no bf16"),
        ("[bf16]", "[bf16", "is not TOML"),
        ("speed = ", "speed = -", "speed"),
    ],
)
def test_a_profile_that_was_changed_is_refused(own, old, new, told):
    file = own / "here-2.profile.toml"
    file.write_text(file.read_text().replace(old, new))
    with pytest.raises(UserError, match=f"profile .*{told}"):
        read_measured(file, "bf16")


# -- runs ----------------------------------------------------------------------------------


def job_on(own, words, *, threads=1, device="cpu"):
    plan = plan_on(words)
    return SimpleNamespace(
        plan=plan,
        layout=plan.layout,
        method=plan.method,
        cache=own.parent,
        threads=threads,
        device=device,
    )


def measured_here(own):
    """Makes the files those of this machine."""
    for file in own.glob("*.profile.toml"):
        text = file.read_text().replace(json.dumps(FACTS.cpu), json.dumps(cpu_model()))
        file.write_text(text.replace(FACTS.torch, str(torch.__version__)))


def test_the_last_lines_show_predicted_beside_measured_time(own):
    measured_here(own)
    job = job_on(own, "dp2 x2")
    expected = predict(job.plan, load_cluster("here", own=own)).time.seconds
    (line,) = compare_time(job, [9.0, 2 * expected, 0.0])
    assert f"{2 * expected:.4g} s a step; howdah measure of 2026-11-23 predicted" in line
    assert line.endswith(f"predicted {expected:.4g}: +100.0%")
    assert predicted_time(job)[0].split()[1] == f"{expected:.4g}"
    assert compare_time(job, []) == []


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("words", "how", "told"),
    [
        ("dp3", {}, "howdah measure --ranks 3"),
        ("dp2", {"threads": 2}, "1 thread a rank; run it again here"),
        ("dp2", {"device": "cuda"}, "only steps on CPUs"),
    ],
)
def test_a_run_that_was_not_measured_says_what_to_do(own, words, how, told):
    measured_here(own)
    job = job_on(own, words, **how)
    (line,) = compare_time(job, [1.0])
    assert line.startswith("time        1 s a step; not predicted: ")
    assert told in line
    assert predicted_time(job) == []


def test_another_machine_predicts_nothing(own):
    (line,) = compare_time(job_on(own, "dp2"), [1.0])
    assert 'run on A "B" CPU' in line
