"""Matrix products by shape, attention by kernel, and profiles, against sums by hand."""

import csv
import json
from dataclasses import fields, replace
from math import log
from pathlib import Path
from statistics import mean

import pytest
from pytest import approx
from round_steps import clock_of, plan_of, wires

from howdah.base.errors import UserError
from howdah.machines.cluster import Efficiency, Link, attained
from howdah.machines.cluster_file import load_cluster
from howdah.plan.batch import Batch
from howdah.plan.layout import parse_layout
from howdah.plan.method import Method
from howdah.plan.plan import make_plan
from howdah.plan.schedule.actions import Kind
from howdah.shapes.dims import Dim, RankSizes
from howdah.shapes.presets import preset
from howdah.shapes.products import Product
from howdah.sim.operator_times import Speeds
from howdah.sim.profile import (
    FOLDER,
    PLAIN,
    Curve,
    Profile,
    _read,
    curve_of,
    load_profile,
    named_profile,
    own_profile,
    profile_names,
    profile_of,
)
from howdah.sim.step_time import step_time

MEASURED = Path(__file__).parents[3] / "shared/data/published/microbench.csv"
BENCH = Path(__file__).parents[2] / "bench/planner"
NUMBERS = {one.name for one in fields(Profile) if one.type in (float, int, "float", "int")}


def speeds_of(name, precision="bf16", profile=PLAIN, **measured):
    cluster = replace(load_cluster(name), efficiency=Efficiency(1, 1, 1, 1), measured=())
    return Speeds(cluster, attained(cluster), Method(precision=precision), profile), cluster


def test_a_product_loses_speed_with_small_sizes_and_part_waves():
    speeds, cluster = speeds_of("a100-80")
    curve, dense = curve_of(cluster.device), cluster.device.flops.bf16
    m, k, n = 128 * 27, 4096, 256 * 4  # 108 tiles: one whole wave
    lost = 1 + curve.m0 / m + curve.n0 / n + curve.k0 / k
    rate = dense * curve.sustained
    assert speeds.product(m, k, n) == pytest.approx(2 * m * k * n * lost / rate)
    more = 2 * (m + 128) * k * n / speeds.product(m + 128, k, n)  # a second wave, nearly empty
    assert more < 0.7 * 2 * m * k * n / speeds.product(m, k, n)
    assert speeds.product(m, k, n, count=2) == pytest.approx(2 * speeds.product(m, k, n))
    assert speeds.product(0, k, n) == 0


def test_odd_widths_are_slower_and_odd_numbers_of_tokens_are_not():
    speeds, _ = speeds_of("a100-80")

    def rate(width, tokens=4096):
        one = Product("up", "token", Dim("ffn", width), Dim("width", 4096))
        of = RankSizes({"token": tokens}, {})
        return tokens * width / sum(speeds.operator(one, of))

    assert rate(2048) > rate(2032) > rate(2040) > rate(2047)
    assert rate(2048, 4095) == pytest.approx(rate(2048), rel=0.01)


def test_low_precision_is_that_of_linear_layers_alone():
    (sixteen, cluster), (eight, _) = speeds_of("h100"), speeds_of("h100", "fp8")
    size = 4096, 4096, 4096
    assert eight.product(*size) == sixteen.product(*size)
    ratio = cluster.device.flops.fp8 * 0.7 / (cluster.device.flops.bf16 * 0.9)
    assert sixteen.product(*size) / eight.product(*size, low=True) == pytest.approx(ratio)
    with pytest.raises(UserError, match="no fp4 arithmetic"):
        speeds_of("h100", "nvfp4")
    four, _ = speeds_of("b200", "nvfp4")
    assert four.product(*size, low=True) < speeds_of("b200", "mxfp8")[0].product(*size, low=True)


def test_older_flash_kernels_are_slower_on_newer_devices():
    found = {
        (name, kind): speeds_of(name, profile=replace(PLAIN, flash=kind))[0].attention(
            1e15, 128, back=False
        )
        for name in ("a100-80", "h100")
        for kind in (1, 2, 3)
    }
    assert found["a100-80", 3] == found["a100-80", 2] < found["a100-80", 1]
    assert found["h100", 3] == pytest.approx(0.62 * found["h100", 2])


def test_less_power_is_less_speed():
    cluster = load_cluster("h100")
    less = replace(cluster, device=replace(cluster.device, watts=350.0))
    whole, half = (
        Speeds(one, attained(one), Method(precision="bf16"), PLAIN) for one in (cluster, less)
    )
    assert half.product(4096, 4096, 4096) / whole.product(4096, 4096, 4096) == approx(2**0.5)
    pairs = (one.attention(1e15, 128, back=False) for one in (half, whole))
    assert next(pairs) / next(pairs) == approx(2**0.5)


def test_more_power_is_more_speed_and_a_higher_peak_is_not():
    cluster = load_cluster("b200")
    flops = replace(cluster.device.flops, bf16=2500e12)
    seconds = []
    for changes in ({}, {"watts": 1200.0}, {"flops": flops}):
        nominal = replace(cluster, device=replace(cluster.device, **changes), measured=())
        speeds = Speeds(nominal, attained(nominal), Method(precision="bf16"), PLAIN)
        seconds.append(speeds.product(8192, 8192, 8192))
    assert seconds[0] == pytest.approx(seconds[1] * 1.2**0.5)
    assert seconds[0] == pytest.approx(seconds[2])


@pytest.mark.skipif(not MEASURED.exists(), reason="no published measurements beside the project")
@pytest.mark.parametrize(
    ("name", "hardware", "off"), [("a100-80", "A100-PCIe", 0.05), ("b200", "B200", 0.14)]
)
def test_products_are_those_that_were_measured(name, hardware, off):
    """Of one device the curve's own constants were fitted to these rows; the best product's speed
    is the rows' median.
    """
    speeds, cluster = speeds_of(name)
    errors = []
    with MEASURED.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if (row["kind"], row["hardware"]) == ("op efficiency matmul", hardware):
                size = dict(one.split("=") for one in row["size"].split(", "))
                m, k, n = (int(size[one]) for one in "mkn")
                rate = 2 * m * k * n / speeds.product(m, k, n) / cluster.device.flops.bf16
                errors.append(log(rate / float(row["value"])))
    middle = sorted(errors)[len(errors) // 2]
    assert mean(abs(one - middle) for one in errors) < off


def test_only_products_of_experts_wait_for_memory():
    """Eight experts with 16 rows each; the gradient of a weight is read and written in float32."""
    speeds, _ = speeds_of("h100")
    of, wide, inner = RankSizes({"token": 64}, {}), Dim("expert_ffn", 512), Dim("width", 1024)
    alone = Product("gate", "token", wide, inner)
    experts = replace(alone, copies=2, groups=8)
    waits = [8 * speeds.moved(*size) for size in ((16, 1024, 512), (16, 512, 1024))]
    waits.append(8 * speeds.moved(512, 16, 1024, weight=True))
    sizes = (16, 1024, 512), (16, 512, 1024), (512, 16, 1024)
    products = [speeds.product(*size, count=8, low=True) for size in sizes]
    assert [*speeds.operator(experts, of)] == approx(
        [p + w for p, w in zip(products, waits, strict=True)]
    )
    assert waits[2] > 3 * waits[0] > 0
    assert speeds.operator(alone, of).forward == approx(speeds.product(64, 1024, 512))


@pytest.mark.skipif(not MEASURED.exists(), reason="no published measurements beside the project")
@pytest.mark.parametrize(
    ("name", "hardware", "off"), [("a100-80", "A100-PCIe", 0.1), ("b200", "B200", 0.17)]
)
def test_products_of_experts_are_those_that_were_measured(name, hardware, off):
    """They wait for weights, and for gradients in float32: without that 24 and 48 % are missing."""
    cluster = load_cluster(name)
    speeds = Speeds(cluster, attained(cluster), Method(precision="bf16"), PLAIN)
    errors = []
    with MEASURED.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if (row["kind"], row["hardware"]) == ("op efficiency group_matmul", hardware):
                size = dict(one.split("=") for one in row["size"].split(", "))
                m, k, n, count = (int(size[one]) for one in ("M", "K", "N", "ng"))
                weight = size["stage"] == "bwd_grad_w"
                moved = speeds.moved(n, m, k, weight=True) if weight else speeds.moved(m, k, n)
                took = speeds.product(m, k, n, count=count) + count * moved
                rate = 2 * m * k * n * count / took / cluster.device.flops.bf16
                errors.append(log(rate / float(row["value"])))
    assert mean(map(abs, errors)) < off


def test_every_value_of_a_profile_says_where_it_is_from():
    for name in (*profile_names(), "devices"):
        said = _read(name)
        tables = [said] if name != "devices" else list(said.values())
        rows = [row for table in tables for row in table.values() if isinstance(row, dict)]
        assert rows, name
        for row in rows:
            assert "value" in row, name
            assert row["source"].startswith(("assumed", "documented", "fitted", "measured")), row
        if any(row["source"].startswith("fitted") for row in rows) and name != "devices":
            assert said["fitted_on"], name


def test_profiles_have_known_names_and_sound_values():
    assert {path.stem for path in FOLDER.glob("*.toml")} == {*profile_names(), "devices"}
    for name in profile_names():
        profile = load_profile(name)
        assert all(getattr(profile, one) >= 0 for one in NUMBERS), name
        assert profile.slowdown >= 1 and profile.summary
    assert named_profile("generic") is load_profile("generic")
    with pytest.raises(UserError, match="did you mean 'megatron-core'"):
        named_profile("megatron_core")


def test_the_interval_is_that_of_runs_that_nothing_was_fitted_to():
    """The committed result; its intervals held about four fifths of the runs they did not know."""
    found = json.loads((BENCH / "left_out.json").read_text(encoding="utf-8"))
    assert 75 <= found["covered"] <= 85
    for name in profile_names():
        assert load_profile(name).spread == round(found["factor"], 2), name
    time = step_time(plan_of("x1"), wires(1e9), load_profile("generic"))
    low, high = time.interval
    assert low < time.seconds < high and low * high == pytest.approx(time.seconds**2)
    assert step_time(plan_of("x1"), wires(1e9)).interval is None


@pytest.mark.parametrize(
    ("framework", "profile"),
    [
        ("Megatron-DeepSpeed", "megatron-deepspeed"),
        ("Megatron-Bridge/Megatron-Core 25.09", "megatron-bridge"),
        ("Megatron-Bridge/Megatron-Core 26.06", "megatron-bridge-2606"),
        ("NeMo/Megatron-Core", "megatron-bridge"),
        ("Megatron-Core (TE)", "megatron-core"),
        ("MaxText", "xla"),
        ("NeMo-Megatron", "nemo-2023"),
        ("Megatron-LM", "megatron-lm-2021"),
        ("Megatron-LM 0.14", "megatron-core"),
        ("torchtitan FSDP2 + torch.compile", "torchtitan-compile"),
        ("torchtitan FSDP2", "torchtitan"),
        ("llm-foundry/Composer FSDP1", "fsdp1"),
        ("somebody's own", "generic"),
    ],
)
def test_a_framework_has_its_profile(framework, profile):
    assert profile_of(framework).name == profile


def test_own_runs_have_a_profile_where_the_device_is_known():
    assert own_profile(load_cluster("h100").device).name == "howdah"
    assert own_profile(load_cluster("laptop-cpu").device) is PLAIN
    assert own_profile(load_cluster("h100").device).spread > 1


def test_a_card_like_another_has_its_own_best_products_and_no_interval():
    """By profile plain an L40S was faster than an A100."""
    card, like = load_cluster("l40s").device, curve_of(load_cluster("a100-80").device)
    curve = curve_of(card)
    assert (curve.m0, curve.attention) == (like.m0, like.attention)
    assert curve.sustained < like.sustained and (curve.tile, like.tile) == (142, 108)
    assert own_profile(card).name == "howdah" and own_profile(card).spread == 0
    clusters = [load_cluster(name) for name in ("l40sx8", "a100-80x8")]
    layout, batch = parse_layout("dp8 x1"), Batch(micro_batch=2)
    plan = make_plan(preset("llama3-1b"), layout, batch, sequence=4096, method=Method("bf16"))
    slow, fast = (step_time(plan, one, own_profile(one.device)).seconds for one in clusters)
    assert slow > fast


# -- what a profile changes in a step ------------------------------------------


def seconds(layout, profile, bandwidth):
    return step_time(plan_of(layout), wires(bandwidth, per_node=8), profile).seconds


def test_sums_that_wait_for_the_end_are_added_to_the_step():
    plan, fast = plan_of("dp4 x1"), wires(1e30, per_node=8)
    slow = replace(fast, inside=replace(fast.inside, bandwidth=1e6))
    wire = step_time(plan, slow).seconds - step_time(plan, fast).seconds
    clocks = {}
    for beside in (True, False):
        clock, messages, program = clock_of(plan, slow, profile=replace(PLAIN, overlap=beside))
        now = 0.0
        for action in program:
            if action.kind is not Kind.UPDATE:
                now = max(clock.end(action, now), clock.summed(action))
        clocks[beside] = now
    moved = sum(took for _, took in messages.of_sum)
    assert moved == pytest.approx(wire, rel=0.01)
    assert clocks[False] == pytest.approx(9 + moved)  # three blocks of 1 s and of 2 s
    assert clocks[True] < clocks[False]


def test_computation_beside_messages_is_slower():
    plan = plan_of("dp4 x1")
    least, slowed = (_end(plan, replace(PLAIN, slowdown=factor)) for factor in (1.0, 1.25))
    assert least < slowed <= 1.25 * least


def _end(plan, profile):
    clock, _, program = clock_of(plan, wires(1e7, per_node=8), profile=profile)
    now = 0.0
    for action in program:
        if action.kind is not Kind.UPDATE:
            now = clock.end(action, now)
    return now


def test_zero3_without_prefetch_waits_for_each_unit():
    ahead, late = (
        _end(plan_of("dp4 zero3 x1"), replace(PLAIN, gather=gather)) for gather in (True, False)
    )
    assert ahead < late


@pytest.mark.parametrize(
    ("change", "layout"),
    [
        ({"forward": 1.0}, "x1"),
        ({"backward": 1.0}, "x1"),
        ({"step": 1.0}, "x1"),
        ({"matmul": 0.5}, "x1"),
        ({"inside": 0.5}, "tp2 x1"),
        ({"pp": False}, "pp2 x2"),
    ],
)
def test_what_costs_time_makes_a_step_longer(change, layout):
    assert seconds(layout, replace(PLAIN, **change), 1e6) > seconds(layout, PLAIN, 1e6)


def test_hidden_exchanges_take_less():
    half, whole = (seconds("tp2 x1", replace(PLAIN, tp=share), 1e6) for share in (0.5, 0.0))
    assert half == pytest.approx(whole / 2, rel=0.01)


@pytest.mark.parametrize(
    ("name", "same"),
    [
        ("GH200", "H100 SXM"),
        ("H800 SXM", "H100 SXM"),
        ("A800", "A100"),
        ("B300 of GB300", "B200"),
        ("Host core", ""),
        ("Habana Gaudi 3", ""),
        ("BR100", ""),
    ],
)
def test_a_curve_is_that_of_its_own_kind(name, same):
    device = load_cluster("h100").device
    assert curve_of(replace(device, name=name)) == (
        curve_of(replace(device, name=same)) if same else Curve()
    )


def test_states_on_the_host_and_on_disk_cost_their_way():
    """On the host, gradients go down while weights come up; masters and moments do not move, though
    they were priced as if they did. On the disk these are read and written.
    """
    machine = wires(1e30)
    host = replace(machine.host, link=Link("pcie", 1e6, 0.0), disk_bandwidth=1e5)
    machine = replace(machine, host=host)

    def moved(words):
        return step_time(plan_of(words), machine).breakdown["homes"]

    elements = sum(weight.elements for weight in plan_of("x1").weights)
    last = elements / 3  # the third block's weights come when all gradients have gone
    assert moved("x1 optimizer=host") == pytest.approx(4 * (elements + last) / 1e6, rel=0.01)
    disk = 1e5 / machine.devices_per_node
    assert moved("x1 optimizer=disk") == pytest.approx(24 * elements / disk, rel=0.01)


def test_mfu_is_that_of_the_precision_of_linear_layers():
    cluster = load_cluster("b200", devices=8)
    plan = plan_of("dp8 x1")
    found = {
        name: step_time(replace(plan, method=replace(plan.method, precision=name)), cluster)
        for name in ("bf16", "fp8", "nvfp4")
    }
    for name, rate in (("bf16", "bf16"), ("fp8", "fp8"), ("nvfp4", "fp4")):
        work = found[name].mfu * found[name].seconds * getattr(cluster.device.flops, rate)
        assert work == pytest.approx(
            found["bf16"].mfu * found["bf16"].seconds * cluster.device.flops.bf16
        )
