"""Bills of published runs, from their own figures."""

from math import floor

import pytest
from lecture_formulas import devices_needed, gradient_bytes, rough_flops, throughput

from howdah.machines.cluster_file import load_cluster
from howdah.plan.batch import Batch
from howdah.plan.layout import parse_layout
from howdah.plan.method import Method
from howdah.plan.plan import make_plan
from howdah.shapes.parameters import parameters
from howdah.shapes.presets import preset
from howdah.shapes.products import conventions
from howdah.sim.cost import Cost, Rates, cost, hourly, run_cost
from howdah.sim.kernels import kernels_of
from howdah.sim.memory import memory


def rates(watts, *, rent=None):
    """PUE 1.1 and 0.385 kg/kWh, as in the model cards."""
    return Rates(watts, None, rent, pue=1.1, carbon=0.385)


# -- what was published --------------------------------------------------------

# arXiv 2307.09288, table 2: hours, watts, tonnes.
LLAMA2 = [
    ("7B", 184_320, 400, 31.22),
    ("13B", 368_640, 400, 62.44),
    ("34B", 1_038_336, 350, 153.90),
    ("70B", 1_720_320, 400, 291.42),
]


@pytest.mark.parametrize(("name", "hours", "watts", "tonnes"), LLAMA2)
def test_llama_2_carbon_to_the_printed_digit(name, hours, watts, tonnes):
    """The table cuts after the second digit: 62.447 t are printed as 62.44."""
    bill = cost(hours, devices=1, rates=rates(watts))
    assert floor(100 * bill.tonnes) == round(100 * tonnes)


def test_llama_2_in_all():
    bills = [cost(hours, devices=1, rates=rates(watts)) for _, hours, watts, _ in LLAMA2]
    assert sum(bill.device_hours for bill in bills) == 3_311_616
    assert round(sum(bill.tonnes for bill in bills)) == 539


@pytest.mark.parametrize(
    ("hours", "megawatt_hours", "tonnes"),
    [(82_432, 36, 14), (135_168, 59, 23), (530_432, 233, 90), (1_022_362, 449, 173)],
)
def test_llama_1_energy_and_carbon(hours, megawatt_hours, tonnes):
    """arXiv 2302.13971, table 15, at 400 W. 65B uses 449.8 MWh; the table cuts it to 449."""
    bill = cost(hours, devices=1, rates=rates(400))
    assert int(bill.kwh / 1000) == megawatt_hours
    assert round(bill.tonnes) == tonnes


def test_llama_1_65b_took_20_8_days():
    """Section 2.4: 380 tokens/s/GPU on 2048 A100, 1.4T tokens; the paper says about 21 days."""
    bill = run_cost(1.4e12, tokens_per_second=380 * 2048, devices=2048, rates=rates(400))
    assert round(bill.days, 1) == 20.8
    assert bill.device_hours == pytest.approx(1_022_362, rel=0.002)


def test_deepseek_v3_pre_training():
    """arXiv 2412.19437, table 1: 180K hours and 3.7 days on 2048 H800 per trillion tokens,
    14.8T tokens, 2664K hours, 5.328M dollars at 2 dollars an hour.
    """
    speed = 1e12 / (180e3 * 3600) * 2048
    trillion = run_cost(1e12, tokens_per_second=speed, devices=2048, rates=rates(700, rent=2))
    assert round(trillion.days, 1) == 3.7
    whole = run_cost(14.8e12, tokens_per_second=speed, devices=2048, rates=rates(700, rent=2))
    assert whole.device_hours == pytest.approx(2.664e6)
    assert whole.rent == pytest.approx(5.328e6)


def test_llama_3_1_405b():
    """The card: 30.84M hours at 700 W. Its 8930 t are between the factor without and with PUE."""
    hourly_rates = hourly(load_cluster("h100"))
    assert hourly_rates.watts == 700
    bill = cost(30.84e6, devices=16_384, rates=hourly_rates)
    assert bill.kwh == pytest.approx(30.84e6 * 0.7 * 1.1)
    assert bill.tonnes / 1.1 < 8930 < bill.tonnes
    assert round(bill.days, 1) == 78.4


# -- the lectures' formulas ------------------------------------------------------


def test_gpt_3_takes_314_zettaflop():
    assert rough_flops(175e9, 300e9) == 3.15e23
    gpt3 = preset("gpt3-175b")
    found = conventions(gpt3, 2048).by_parameters * 300e9
    assert found == pytest.approx(rough_flops(parameters(gpt3).total, 300e9))
    assert found == pytest.approx(3.14e23, rel=0.002)


def test_gpt_3_in_30_days():
    """As many devices as the lecture finds take as long as it asks for."""
    needed = devices_needed(rough_flops(175e9, 300e9), attained=160e12, days=30)
    assert round(needed, 1) == 759.5
    speed = throughput(160e12, devices=needed, parameters=175e9)
    bill = run_cost(300e9, tokens_per_second=speed, devices=needed, rates=rates(400))
    assert bill.days == pytest.approx(30)


def test_global_batches_per_second():
    """1024 devices at 160 TFLOP/s and 90 % scaling, batches of 3.2M tokens: 22.8 s for a batch."""
    batches = throughput(160e12, devices=1024, parameters=175e9, scaling=0.9, batch=3.2e6)
    assert 1 / batches == pytest.approx(22.8, abs=0.05)
    bill = run_cost(300e9, tokens_per_second=batches * 3.2e6, devices=1024, rates=rates(400))
    assert bill.days == pytest.approx(300e9 / 3.2e6 * 22.8 / 86400, rel=0.002)


def test_gradients_of_128_replicas_of_gpt_3():
    assert gradient_bytes(175e9, replicas=128) == 89.6e12
    gpt3 = preset("gpt3-175b")
    method = Method(precision="bf16")
    plan = make_plan(
        gpt3, parse_layout("dp128"), Batch(global_batch=128), sequence=2048, method=method
    )
    held = {row.component: row.bytes for row in memory(plan, 0, kernels_of(plan))}
    total = parameters(gpt3).total
    assert 128 * held["gradients"] == pytest.approx(gradient_bytes(total, replicas=128), rel=1e-6)


# -- rates ---------------------------------------------------------------------


def test_a_bill_by_hand():
    bill = cost(48, devices=2, rates=Rates(500.0, 0.5, 3.0, pue=1.2, carbon=0.4))
    assert bill == Cost(
        days=1,
        device_hours=48,
        purchase=24.0,
        rent=144.0,
        kwh=28.8,
        tonnes=pytest.approx(11.52e-3),
    )


def test_purchase_and_rent_stand_beside_each_other():
    """A TPU is rented at its list price; an H100 of 25000 dollars pays off in five years."""
    tpu = hourly(load_cluster("tpu-v4"))
    assert (tpu.purchase, tpu.rent) == (None, 3.22)
    bought = hourly(load_cluster("h100"))
    assert bought.purchase == pytest.approx(25_000 / (5 * 365.25 * 24))
    assert bought.rent is None
    shorter = hourly(load_cluster("h100"), years=2.5)
    assert shorter.purchase == pytest.approx(2 * bought.purchase)


def test_a_rent_that_is_given_replaces_the_clusters():
    for name in ("tpu-v4", "h100"):
        assert hourly(load_cluster(name), rent=2.5).rent == 2.5


def test_the_price_of_a_node_is_paid_whole():
    """On 2 of its 8 devices, each costs a half of it."""
    node = load_cluster("p5.48xlarge")
    assert hourly(node).rent == pytest.approx(55.04 / 8)
    assert hourly(load_cluster("p5.48xlargex64")).rent == pytest.approx(55.04 / 8)
    assert hourly(load_cluster("p5.48xlargex2")).rent == pytest.approx(55.04 / 2)
    assert hourly(node, rent=1.0).rent == 1.0


def test_energy_between_idle_and_full_power():
    tpu = load_cluster("tpu-v4")  # 90 W idle, 192 W at most
    assert hourly(tpu).watts == 192
    assert hourly(tpu, use=0).watts == 90
    assert hourly(tpu, use=0.5).watts == 141


def test_what_is_not_published_stays_unknown():
    b300 = cost(10, devices=1, rates=hourly(load_cluster("b300")))
    assert (b300.purchase, b300.rent) == (None, None)
    assert b300.kwh is not None
    v5e = cost(10, devices=1, rates=hourly(load_cluster("tpu-v5e")))
    assert (v5e.kwh, v5e.tonnes, v5e.rent) == (None, None, 12.0)
