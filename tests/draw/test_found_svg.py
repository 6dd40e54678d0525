"""The plot of times over devices: every point, on logarithmic axes, with its layout."""

import re

from howdah.draw.found_svg import plot_devices
from howdah.machines.cluster_file import load_cluster
from howdah.plan.method import Method
from howdah.search.search import on_each
from howdah.search.space import Question
from howdah.shapes.presets import preset


def answers(counts):
    question = Question(preset("llama3-8b"), load_cluster("h100"), Method("bf16"), 2048, 16)
    return [found.best[0] for found in on_each(question, counts, None, iter)]


def test_each_number_of_devices_is_a_point_lower_if_it_is_faster():
    choices = answers([4, 8, 16])
    drawn = plot_devices(choices, "llama3-8b <on> H100")
    places = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', drawn)
    xs, ys = [float(x) for x, _ in places], [float(y) for _, y in places]
    assert len(places) == 3 and xs == sorted(xs)
    assert abs((xs[1] - xs[0]) - (xs[2] - xs[1])) < 0.02  # 4, 8, 16: equal steps
    assert (ys == sorted(ys)) == (
        [one.seconds for one in choices][::-1] == sorted(one.seconds for one in choices)
    )
    assert all(str(one.plan.layout) in drawn for one in choices)
    assert "&lt;on&gt;" in drawn and "stroke-dasharray" in drawn and "<polygon" in drawn


def test_one_number_of_devices_is_drawn_too():
    (one,) = answers([8])
    assert plot_devices([one], "a").count("<circle") == 1
