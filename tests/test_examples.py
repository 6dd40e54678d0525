"""The scripts of examples/: short, quoted whole by a page, and right. That they run, and print what
their page shows, is tested with the page (test_docs.py).
"""

import re

import pytest
from run_examples import ROOT, called, load

from howdah.comm.group import Group
from howdah.comm.transport import SingleRank

SCRIPTS = sorted((ROOT / "examples").glob("*.py"))
QUOTED = re.compile(r"^<!-- (examples/\w+\.py) -->\n```python\n(.*?)^```$", re.M | re.S)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_an_example_is_short_and_quoted_whole_by_a_page(path):
    script = path.read_text("utf-8")
    assert script.count("\n") < 60
    name = path.relative_to(ROOT).as_posix()
    quotes = [
        body
        for page in (ROOT / "docs").rglob("*.md")
        for quoted, body in QUOTED.findall(page.read_text("utf-8"))
        if quoted == name
    ]
    assert quotes == [script]


def trained(transport):
    return load("examples/own_net.py").train(Group(transport))


def test_a_net_of_ones_own_trains_on_two_ranks_as_on_one(workers):
    alone = trained(SingleRank())
    for losses in workers.run(trained, ranks=2):
        assert losses == pytest.approx(alone, rel=1e-5)
    page = (ROOT / "docs" / "comm.md").read_text("utf-8")
    (shown,) = re.findall(r"^2 ranks: loss (\S+), after (\d+) steps (\S+)$", page, re.M)
    assert [float(one) for one in shown] == pytest.approx(
        [alone[0], len(alone), alone[-1]], rel=1e-3
    )


def gradients(transport, layout):
    return called(transport, "examples/gradients.py", "gradients", (layout,))


@pytest.mark.parametrize("layout", ["dp2 zero3", "tp2 sp"])
def test_gradients_are_those_of_one_process(workers, layout):
    alone = gradients(SingleRank(), "single")
    for own in workers.run(gradients, layout, ranks=2):
        assert own.keys() == alone.keys()
        for name, gradient in own.items():
            assert (gradient - alone[name]).norm() < 1e-12 * alone[name].norm(), name
