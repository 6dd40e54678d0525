"""A prediction for whatever is asked: a plan or a sentence, and numbers that make sense."""

import json
import math
import random
import re

import pytest

from howdah.base.errors import UserError
from howdah.draw.tables import prediction_data, show_prediction
from howdah.machines.cluster import resized
from howdah.machines.cluster_file import cluster_names, load_cluster
from howdah.plan.batch import Batch
from howdah.plan.layout import CHOICES, SCHEDULES, parse_layout, resolve
from howdah.plan.method import Method
from howdah.plan.plan import make_plan
from howdah.shapes.presets import PRESETS, preset
from howdah.sim.predict import predict

CLUSTERS = [load_cluster(name) for name in cluster_names()]
AXES = ("pp", "cp", "tp", "ep")
PIPES = [{"interleaved": "interleaved v2", "terapipe": "slices3"}.get(s, s) for s in SCHEDULES]


def random_words(draw):
    """A layout as a user might write it: most are sensible, some are not."""
    words = [f"{axis}{draw.choice([2, 2, 4, 3])}" for axis in AXES if draw.random() < 0.3]
    words += [draw.choice(["dp*", "dp*", "dp*", "dp2"])]
    for chance, word in (
        (0.6, f"zero{draw.randint(1, 3)}"),
        (0.1, f"shard{draw.choice([2, 4])}"),
        (0.6, f"x{draw.choice([1, 2, 4, 7, 16])}"),
        (0.7 if any(word.startswith("tp") for word in words) else 0.02, "sp"),
        (0.6 if any(word.startswith("pp") for word in words) else 0.02, draw.choice(PIPES)),
    ):
        words += [word] if draw.random() < chance else []
    for name, values in CHOICES.items():
        words += [f"{name}={draw.choice(values)}"] if draw.random() < 0.1 else []
    return " ".join(words)


def numbers(data):
    """Every number inside plain data."""
    if isinstance(data, dict):
        data = list(data.values())
    if isinstance(data, list):
        for item in data:
            yield from numbers(item)
    elif isinstance(data, int | float):
        yield data


def try_one(draw):
    """One random question; True when it was answered with a plan, False with a sentence."""
    name, cluster = draw.choice([*PRESETS]), draw.choice(CLUSTERS)
    try:
        layout = resolve(
            parse_layout(random_words(draw)), None if draw.random() < 0.1 else cluster.devices
        )
        shape = preset(name)
        plan = make_plan(
            shape,
            layout,
            Batch(micro_batch=draw.choice([1, 1, 2, 5])),
            sequence=draw.choice([1, 64, 511, 512]),
            method=Method(precision=draw.choice(["bf16", "bf16", "float32"])),
        )
        prediction = predict(plan, resized(cluster, plan.layout.world), tokens=1e9)
    except UserError as problem:
        assert str(problem) and "\n" not in str(problem)
        return False
    data = prediction_data(prediction)
    assert all(math.isfinite(n) and n >= 0 for n in numbers(data)), data
    assert json.loads(json.dumps(data)) == data
    for why in (False, True):
        text = "\n".join(show_prediction(prediction, why=why))
        text = re.sub(r"(?m)^        \w+\.[\w.]+ .*", "", text)  # the cluster's numbers
        assert not re.search(r"\de[+-]?\d|\bnan\b|\binf\b| -\d", text), text
        assert all(float(found) <= 100 for found in re.findall(r"mfu ([\d.]+)%", text)), text
        assert "None" not in text
    assert data["step_seconds"] > 0 and data["memory_bytes"][0]["peak"] > 0
    return True


def test_random_questions_get_a_plan_or_a_sentence():
    draw = random.Random(0)
    answered = [try_one(draw) for _ in range(150)]
    assert 20 < sum(answered) < 140  # both happen


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_ten_thousand_random_questions_get_a_plan_or_a_sentence(part):
    """In eight parts: each belongs to another eighth of the slow tests, and takes a minute."""
    draw = random.Random(1 + part)
    answered = sum(try_one(draw) for _ in range(10_000 // 8))
    print(f"{answered} plans, {10_000 // 8 - answered} sentences")
    assert answered > 125


def test_memory_that_was_measured_counts():
    """A B200 has 180 of the 192 GB of its data sheet."""
    b200 = load_cluster("b200x8")
    layout, batch = resolve(parse_layout("dp8 zero3"), None), Batch(micro_batch=1)
    plan = make_plan(preset("laptop"), layout, batch, sequence=64, method=Method())
    assert predict(plan, b200).capacity == 180e9 - b200.device.reserved
