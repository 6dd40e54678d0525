"""The scripts of bench/zeropp: what is compared, what is predicted of it, and what they promise."""

import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "bench" / "zeropp"
SENT = {"zero3 hpz2": 1.33, "zero3, int8": 1.33, "zero3, int4": 1.77, "zero3, hierarchical": 2.0}


@pytest.fixture
def scripts(monkeypatch):
    """Imports modules of the folder, whose names others have too."""
    before, bench = set(sys.modules), FOLDER.parent

    def load(*names):
        for path in (bench, bench / "cluster", FOLDER):
            monkeypatch.syspath_prepend(str(path))
        return [__import__(name) for name in names]

    yield load
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").is_relative_to(bench):
            del sys.modules[name]


def told_of(run, case):
    """What ranks tell that send what is predicted, in steps of two seconds."""
    wanted = run.predicted(case, alone=0.5)
    forms = {
        name: {
            "seconds": [2.0] * 3,
            "card": [1.02 * one["leaving"]] * 3,
            "sent": [one["all"]] * 3,
        }
        for name, one in wanted.items()
    }
    alone = {"seconds": [0.5] * 3, "card": [0] * 3, "sent": [0] * 3}
    losses = {name: [4.0, 3.0] for name in wanted}
    return {"forms": {**forms, run.ALONE: alone}, "losses": losses}


def test_all_three_send_four_times_less_and_each_alone_as_much_as_the_plan_says(scripts):
    (run,) = scripts("run")
    one, four = run.cases(tiny=False)
    rows = {row["form"]: row for row in run.summary(one, told_of(run, one))}
    for form, times in SENT.items():
        assert rows[form]["fewer"] == pytest.approx(times, abs=0.01), form
    assert rows[run.WHOLE]["fewer"] == pytest.approx(6.28, abs=0.01)
    plain = run.leaving(four.plan(run.FORMS[run.PLAIN]))
    assert plain / run.leaving(four.plan(run.FORMS[run.WHOLE])) > 2 * rows[run.WHOLE]["fewer"]
    # every rank sends every share to both ranks of the other host: weights twice, gradients once
    elements = sum(weight.elements for weight in run.weights(one.shape))
    assert rows[run.PLAIN]["predicted"]["leaving"] == pytest.approx(8 * elements, rel=0.01)


def test_the_prediction_knows_how_fast_a_rank_alone_was(scripts):
    (run,) = scripts("run")
    (case, _) = run.cases(tiny=True)
    slow, fast = (run.predicted(case, alone)[run.WHOLE]["seconds"] for alone in (1.0, 0.1))
    assert fast < slow < 2


def test_bytes_losses_and_the_goal_are_judged(scripts):
    (run,) = scripts("run")
    (case, _) = run.cases(tiny=True)
    told = told_of(run, case)
    rows = run.summary(case, told)
    assert run.faults(rows, told["losses"]) == []
    text = run.table(rows)
    assert f"| x1 | {run.WHOLE} | " in text and "| x1 | alone |  |  |  | 0.500 | " in text
    forms = told["forms"]
    forms[run.PLAIN]["sent"] = [1]
    forms[run.COPIED]["card"] = [1] * 3
    forms[run.WHOLE]["card"] = forms[run.PLAIN]["card"]
    told["losses"][run.COPIED] = [4.0, 3.1]
    found = run.faults(run.summary(case, told), told["losses"])
    assert [
        any(f"x1 {form}: {what}" in one for one in found)
        for form, what in (
            (run.PLAIN, "counted [1] bytes"),
            (run.COPIED, "the card sent 1,"),
            (run.WHOLE, "sends 1.00 times less, not 4"),
            (run.COPIED, "other losses"),
        )
    ] == [True] * 4, found


def test_losses_are_compared_seed_by_seed(scripts):
    (curves,) = scripts("curves")

    def ran(form, seed, loss):
        return {"form": form, "seed": seed, "curve": {50: loss + 1, 100: loss}, "loss": loss}

    rows = [ran(curves.PLAIN, 1, 3.0), ran(curves.COPIED, 1, 3.0), ran("int4", 1, 3.02)]
    rows += [ran(curves.PLAIN, 2, 4.0), ran("int4", 2, 3.99)]
    found = curves.summary(rows)
    assert curves.faults(found) == []
    plain, copied, narrow = curves.table(found).splitlines()[2:]
    assert plain == "| zero3 | 4.5000 | 3.5000 | ± 0.7071 | equal, step by step |  |"
    assert copied.endswith("| equal, step by step |  |")
    assert narrow.endswith("| 3.5050 | ± 0.6859 | +0.0050 | -0.0100 to +0.0200 |")
    found[1]["same"] = False
    assert curves.faults(found) == [f"{curves.COPIED}: other losses than zero3"]


def test_every_form_is_a_recipe(scripts):
    curves, forms = scripts("curves", "forms")
    for name, form in forms.FORMS.items():
        job = curves.job_of(form, 1, 300, Path("run"))
        assert str(job.layout) == f"{form.words} x1", name
        assert (job.plan.method.gather_dtype, job.plan.method.gradient_dtype) == (
            form.gathers,
            form.sums,
        )
