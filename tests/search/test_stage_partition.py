"""PipeDream's planner: against every pipeline of a few parts, and against the authors' plan."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from howdah.search.stage_partition import Profile, Replicated, pipedream


def cuts_into(length, stages):
    """Every way to cut range(length) into that many runs, none empty."""
    for inner in itertools.combinations(range(1, length), stages - 1):
        yield list(itertools.pairwise((0, *inner, length)))


def bottleneck(profiles, stages, bandwidth):
    """The slowest step of a pipeline of (start, stop, replicas), straight from the formulas."""
    times = []
    for start, stop, m in stages:
        compute = sum(p.compute for p in profiles[start:stop])
        weights = sum(4 * (m - 1) * p.weights / (m * bandwidth) for p in profiles[start:stop])
        times.append(max(compute, weights) / m)
        if start > 0:
            times.append(2 * profiles[start - 1].output / bandwidth)
    return max(times)


def every_pipeline(length, workers):
    for stages in range(1, min(length, workers) + 1):
        for cut in cuts_into(length, stages):
            for counts in cuts_into(workers, stages):
                yield [
                    (start, stop, last - first)
                    for (start, stop), (first, last) in zip(cut, counts, strict=True)
                ]


numbers = st.integers(0, 20).map(float)
profiles = st.lists(st.builds(Profile, numbers, numbers, numbers), min_size=1, max_size=5)


@given(profiles, st.integers(1, 6), st.integers(1, 4))
def test_no_other_pipeline_has_a_shorter_bottleneck(profiles, workers, bandwidth):
    names = {f"part {n}": profile for n, profile in enumerate(profiles)}
    stages, time = pipedream(names, workers, bandwidth=bandwidth)
    assert [part for stage in stages for part in stage.parts] == list(names)
    assert sum(stage.replicas for stage in stages) == workers
    ends = list(itertools.accumulate((len(stage.parts) for stage in stages), initial=0))
    bounds = itertools.pairwise(ends)
    found = [(start, stop, s.replicas) for (start, stop), s in zip(bounds, stages, strict=True)]
    assert time == pytest.approx(bottleneck(profiles, found, bandwidth))
    pipelines = every_pipeline(len(profiles), workers)
    assert time == pytest.approx(min(bottleneck(profiles, p, bandwidth) for p in pipelines))


# Milliseconds forward and backward, bytes of output and of weights of a minibatch of 128, as
# PipeDream's authors measured them: github.com/msr-fiddle/pipedream,
# profiler/image_classification/profiles/vgg16. Each convolution with the ReLU and pool after it.
VGG16 = [
    (56.919, 1644167168, 7168),
    (178.671, 411041792, 147712),
    (59.900, 822083584, 295424),
    (85.573, 205520896, 590336),
    (31.906, 411041792, 1180672),
    (47.584, 411041792, 2360320),
    (53.685, 102760448, 2360320),
    (25.545, 205520896, 4720640),
    (38.786, 205520896, 9439232),
    (43.551, 51380224, 9439232),
    (14.039, 51380224, 9439232),
    (12.119, 51380224, 9439232),
    (14.107, 12845056, 9439232),
    (7.457, 2097152, 411058176),
    (1.752, 2097152, 67125248),
    (0.941, 512000, 16388000),
]


def test_vgg16_on_sixteen_workers():
    """The authors' plan at 10 Gbit/s is 15-1: the convolutions 15 times, the rest once."""
    table = {f"{n}": Profile(ms / 1e3, out, own) for n, (ms, out, own) in enumerate(VGG16)}
    stages, time = pipedream(table, 16, bandwidth=10e9 / 8)
    convolutions, linear = list(table)[:13], list(table)[13:]
    assert stages == (Replicated(tuple(convolutions), 15), Replicated(tuple(linear), 1))
    assert time == pytest.approx(662.385e-3 / 15)


def test_free_communication_is_data_parallelism():
    table = {f"{n}": Profile(1.0 + n, 0.0, 0.0) for n in range(4)}
    assert pipedream(table, 3, bandwidth=1.0) == ((Replicated(tuple(table), 3),), 10 / 3)


def test_a_hundred_parts_on_sixty_four_workers():
    """Trying all pipelines would not end: heavy weights leave one part to each worker."""
    table = {f"{n}": Profile(1.0, 0.0, 1e9) for n in range(100)}
    stages, time = pipedream(table, 64, bandwidth=1.0)
    assert [stage.replicas for stage in stages] == [1] * 64
    assert time == 2.0
