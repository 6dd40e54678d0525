"""Sentences of pages that were not so, or that say what is missing, beside what they speak of."""

import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import get_args, get_type_hints

from howdah.base.their_words import ABSENT, our_key
from howdah.cli.commands import app
from howdah.config.keys import find_keys, recipe_keys
from howdah.host.doctor import doctor
from howdah.model.hub import READ
from howdah.model.hub_fp8 import block_of
from howdah.plan.batch import Batch
from howdah.plan.layout import parse_layout
from howdah.plan.method import Method, Optimizer
from howdah.plan.plan import make_plan
from howdah.shapes.huggingface_names import SCALING
from howdah.shapes.huggingface_written import CLASSES
from howdah.shapes.presets import preset
from howdah.sim.traffic import step_traffic

ROOT = Path(__file__).parents[1]


def text_of(page):
    return " ".join((ROOT / page).read_text("utf-8").split())


def row_of(page, name):
    """The text beside a name in a table of a page."""
    (found,) = re.findall(rf"^\| `?{name}`? \| (.*) \|$", (ROOT / page).read_text("utf-8"), re.M)
    return found


def test_doctor_says_nothing_of_shared_memory_files(tmp_path):
    """It warned of a small /dev/shm, which no transport uses any more."""
    said = " ".join(f"{one.name} {one.value} {one.lack}" for one in doctor(tmp_path))
    assert "shm" not in said + text_of("docs/doctor.md")


def test_exposed_is_told_alike():
    source = text_of("howdah/train/metrics.py")
    said = row_of("docs/training.md", "exposed")
    waited = "in which computation waited for other ranks, or for what comes from"
    assert said.startswith(f"share of time {waited} [its home]")
    assert f"exposed share of the time {waited}" in source


def test_only_what_may_beat_the_bound_does():
    """Sums read more than they write; one in the arena makes no copy, and exceeds it by far."""
    page = text_of("bench/collectives/README.md")
    assert "may come out above 100 %, and one in the arena, which makes no copy, exceeds" in page
    cases = json.loads((ROOT / "bench/collectives/results.json").read_text("utf-8"))["cases"]
    above = {
        (case["case"].partition(",")[0], name): one["share of the bound"]
        for case in cases
        for name, one in case["contestants"].items()
        if one["share of the bound"] > 1.005 and name != "bound"
    }
    assert {op for op, _ in above} == {"all_reduce"}
    assert max(above, key=above.__getitem__) == ("all_reduce", "engine, arena")


def test_the_kept_input_of_sp_saves_a_fifth_of_its_bytes():
    """Decision 0008: ten units a block where eight would do; the ends of the model have others."""
    page = text_of("docs/decisions/README.md")
    assert "ten units of T·h·(t−1)/t a block where eight would do" in page
    assert "a layout can choose the other one by `inputs=gathered`" in page

    def sent(layout, layers):
        shape = replace(preset("laptop"), layers=layers)
        plan = make_plan(shape, parse_layout(layout), Batch(1, 1), sequence=64, method=Method())
        return sum(step_traffic(plan, 0).values())

    block = {word: sent(f"tp2 sp{word}", 2) - sent(f"tp2 sp{word}", 1) for word in ("", KEPT)}
    norms = sent("tp2 sp dp1", 2) - sent("tp2 sp dp1", 1) - block[""]
    assert norms == 0 and 1.24 < block[""] / block[KEPT] <= 1.25


KEPT = " inputs=gathered"


def test_what_is_said_to_be_missing_is_missing():
    methods = row_of("README.md", "methods")
    assert "There is no QLoRA" in methods and "your own `nn.Module`" in methods
    assert "There is no QLoRA" in text_of("docs/their-words.md")
    assert "takes a plan, not an `nn.Module`" in text_of("docs/library.md")
    assert ABSENT["qlora"].startswith("not there yet")
    assert [word for word in ("qlora", "prompt_") if find_keys(word)] == []
    assert {key.name for key in recipe_keys() if "prompt" in key.name} == {"train.prompt"}


def test_the_readme_names_the_optimizers_that_there_are():
    names = get_args(get_type_hints(Optimizer)["name"])
    said = row_of("README.md", "optimizers").lower()
    assert [name for name in names if name not in said] == []
    assert said.count(",") + 1 == len(names)


def pages():
    """Names of pages that say what is, and not what was."""
    return [
        page.relative_to(ROOT).as_posix()
        for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"))
        if page.name not in ("log.md", "CHANGELOG.md") and page.parent.name != "decisions"
    ]


def test_no_page_says_that_there_is_none_of_what_has_a_key():
    """ "There is no LoRA" stood in fine-tune.md after adapters had come."""
    denied = {
        (page, word)
        for page in pages()
        for word in re.findall(r"\bthere is no `?([\w-]+)", text_of(page), re.I)
    }
    assert ("docs/how-to/resume-elsewhere.md", "conversion") in denied
    assert [one for one in denied if our_key(one[1]) or one[1] == "LoRA"] == []


def test_pages_name_every_model_that_can_be_read():
    """The how-to knew four types when there were fourteen, and hub.md refused 8 bits."""
    said = re.search(r"Models of type (.*?) can be trained", text_of("docs/how-to/fine-tune.md"))
    assert sorted(re.findall(r"`(\w+)`", said[1])) == sorted(READ)
    hub = text_of("docs/hub.md")
    assert [name for name in CLASSES.values() if f"`{name}`" not in hub] == []
    assert "its weights in 8 bits are widened while they are read" in hub
    assert block_of(
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    ) == (128, 128)
    for page, before in (("docs/hub.md", "or stretched by "), ("docs/presets.md", "stretched by ")):
        said = text_of(page).partition(before)[2]
        assert re.findall(r"`(\w+)`", said)[: len(SCALING)] == [*SCALING], page


def test_what_is_only_planned_is_said_alike():
    """planning.md called many layouts so, and parameter servers not planned at all."""
    rows = re.findall(r"^\| `(\w+)` .* (planned|runs) \|$", layouts(), re.M)
    planned = [word for word, state in rows if state == "planned"]
    page = text_of("docs/planning.md")
    assert " and ".join(f"`{word}`" for word in planned) + " can be planned, but not run" in page
    shape = preset("laptop")
    plan = make_plan(shape, parse_layout("dp2 server1"), Batch(2), sequence=64, method=Method())
    assert step_traffic(plan, 0) and "[Parameter servers](forms/parameter-server.md) are" in page


def layouts():
    return (ROOT / "docs/layouts.md").read_text("utf-8")


def test_commands_that_are_named_are_there():
    """`howdah report` was in the page on two machines, and nowhere else."""
    there = {one.name or one.callback.__name__ for one in app.registered_commands}
    there |= {one.name for one in app.registered_groups}
    listed = re.compile(r"`howdah ([a-z]+)[^`]*`((?:(?:,| and|, and) `[a-z]+`)*)")
    for page in pages():
        for first, others in listed.findall(text_of(page)):
            assert {first, *re.findall(r"`([a-z]+)`", others)} <= there, page


def test_the_text_of_the_start_can_be_copied(tmp_path):
    """`cp docs/*.md docs/*/*.md text/` ended with an error: two pages have the name data.md."""
    (line,) = re.findall(r"^cp .*$", (ROOT / "docs/start.md").read_text("utf-8"), re.M)
    copy = re.sub(r" text/?$", f" '{tmp_path}/text'", line)
    subprocess.run(["sh", "-c", copy], cwd=ROOT, check=True)
    pages = {path.name for path in (tmp_path / "text").rglob("*.md")}
    assert pages == {path.name for path in (ROOT / "docs").rglob("*.md")}
