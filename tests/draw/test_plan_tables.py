"""The numbers of a plan's text: units by size, and nothing where there is nothing."""

import pytest

from howdah.config.drafts import Draft, draft
from howdah.draw.tables import large, show_prediction, size_of, spell_causes
from howdah.machines.cluster_file import load_cluster
from howdah.sim.predict import predict


def lines(model, layout, cluster, *, why=False, tokens=0):
    devices = load_cluster(cluster)
    plan = draft(model, Draft(layout), devices=devices.devices).plan
    return show_prediction(predict(plan, devices, tokens=tokens), why=why)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (224, "224 B"), (1790, "1.79 kB"), (159e6, "159 MB"), (2e15, "2,000,000 GB")],
)
def test_bytes_have_the_unit_of_their_size(count, text):
    assert size_of(count) == text


def test_less_than_a_thousandth_is_nothing():
    terms = {"a": 1e9, "b": 2e6, "scalars": 192, "zero": 0}
    assert large(terms) == {"a": 1e9, "b": 2e6}
    assert large(terms, why=True) == {"a": 1e9, "b": 2e6, "scalars": 192}
    assert spell_causes({"compute": 1.5, "memory": 0.25, "waiting": 2.2e-16}) == (
        "compute 1.5 s, memory-bound 250 ms"
    )


def test_a_small_plan_has_small_units():
    found = lines("model.preset=laptop", "pp4 dp2", "h100x8", tokens=10_000)
    assert "layout  pp4 dp2 1f1b x1 on 8 x H100 SXM5 80 GB" in found
    assert "memory  33.2 MB a device of 78.5 GB: fits" in found
    assert any(line.startswith("  stage 1, 1 part: 14.4 = weights 1.38, ") for line in found)
    assert "  pp  send            nvlink4  131 kB" in found
    assert not any("scalars" in line for line in found)
    assert found[-1] == (
        "run     0.14 seconds, under 0.01 device-hours, under 0.01 USD (purchase over 5 years), "
        "0.2 Wh, 0.1 g CO2eq"
    )


def test_why_shows_what_is_next_to_nothing():
    assert any(
        "scalars" in line for line in lines("model.preset=laptop", "pp4 dp2", "h100x8", why=True)
    )
