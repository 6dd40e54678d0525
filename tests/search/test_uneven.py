"""Stages by time, against every cut by simulation and in a search; replicas and slices by time."""

import itertools
from dataclasses import replace

import pytest

from howdah.machines.cluster_file import load_cluster
from howdah.plan.layout import parse_layout
from howdah.plan.method import Method
from howdah.plan.stages import Stages, by_cost
from howdah.search.part_tables import PartTables
from howdah.search.search import Choice, search
from howdah.search.space import Question
from howdah.search.stage_cut import GAIN, part_seconds
from howdah.search.uneven import uneven
from howdah.shapes.presets import preset
from howdah.sim.profile import own_profile
from howdah.sim.step_time import step_time


def asked(layout, batch=16, sequence=2048, **sizes):
    shape = replace(preset("llama3-1b"), **sizes)
    question = Question(shape, load_cluster("h100x4"), Method("bf16"), sequence, batch)
    plan = question.plan(parse_layout(layout), 1)
    profile = own_profile(question.cluster.device)
    time = step_time(plan, question.cluster, profile)
    return question, Choice(plan, time, 0, 1.0), profile


def cuts(parts, stages):
    for inner in itertools.combinations(range(1, len(parts)), stages - 1):
        yield tuple(parts[a:b] for a, b in itertools.pairwise((0, *inner, len(parts))))


def test_stages_of_equal_seconds_are_the_fastest_of_all_cuts():
    question, choice, profile = asked("pp4 1f1b", layers=6, tie_embeddings=False)
    seconds = part_seconds(PartTables(question, profile), choice.plan)
    found = by_cost(seconds, choice.plan.stages.where)

    def simulated(parts):
        plan = replace(choice.plan, stages=Stages(parts, choice.plan.stages.where))
        return step_time(plan, question.cluster, profile).seconds

    every = [simulated(parts) for parts in cuts(tuple(seconds), 4)]
    assert simulated(found.parts) <= min(every) * 1.02


def test_a_search_spells_stages_of_equal_seconds_where_they_are_faster():
    shape = replace(preset("gpt2-1.5b"), layers=50)
    question = Question(shape, load_cluster("rack-10gbex4"), Method("fp16"), 1024, 16)
    found = search(question)
    cut = [one for one in found.best if one.plan.layout.stages]
    assert cut
    for choice in cut:
        layout = choice.plan.layout
        assert parse_layout(str(layout)) == layout
        even = question.plan(replace(layout, stages=None), choice.plan.micro_batch)
        profile = own_profile(question.cluster.device)
        before = step_time(even, question.cluster, profile).seconds
        assert choice.seconds < before * (1 - GAIN)


def test_the_seconds_of_parts_are_those_of_the_simulation():
    question, choice, profile = asked("pp2 1f1b", layers=4)
    seconds = part_seconds(PartTables(question, profile), choice.plan)
    busy = sum(choice.time.breakdown[name] for name in ("compute", "memory", "recompute"))
    stage = max(sum(seconds[part] for part in parts) for parts in choice.plan.stages.parts)
    assert stage * choice.plan.micros == pytest.approx(busy, rel=0.1)


def test_slices_are_told_where_a_pipeline_is_empty_otherwise():
    few = uneven(*asked("pp4 1f1b", batch=1, sequence=1 << 15, layers=6))
    (told,) = [one for one in few if one.startswith("TeraPipe")]
    assert " slices (" in told
    words = told.partition("(")[2].partition(")")[0].split()
    lengths = [int(word) for word in words if word != "..."]
    assert len(lengths) > 1 and max(lengths) == lengths[0]  # later tokens attend to more
    many = uneven(*asked("pp4 1f1b", batch=64, layers=6))
    assert not any(one.startswith("TeraPipe") for one in many)
    assert [*uneven(*asked("dp4"))] == []
