"""`howdah draw collective`: pictures, options, and what it refuses."""

import pytest
from typer.testing import CliRunner

from howdah.base.errors import UserError
from howdah.cli.commands import app
from howdah.cli.draw import draw_collective, draw_experts
from howdah.collectives.check import problems
from howdah.collectives.one_to_all import linear
from howdah.collectives.registry import ALGORITHMS, Algorithm, build
from howdah.collectives.rooted import rooted
from howdah.draw.collective import draw
from howdah.machines.cluster_file import load_cluster
from howdah.sim.programs import cheapest


def run(*words):
    told = CliRunner().invoke(app, ["draw", "collective", *words])
    return told.exit_code, told.output


def test_a_picture():
    assert run("ring", "--ranks", "4") == (0, draw(build("ring", 4)) + "\n")
    assert run("ring") == run("all_reduce/ring", "--ranks", "4")


def test_options_reach_the_algorithm():
    here = {
        ("torus", "--ranks", "8", "--dims", "2x4"): build("torus", 8, dims=(2, 4)),
        ("leader", "--ranks", "6", "--per-node", "3"): build("leader", 6, per_node=3),
        ("broadcast/ring", "--pieces", "3", "--root", "2"): build(
            "broadcast/ring", 4, pieces=3, root=2
        ),
    }
    for words, program in here.items():
        assert run(*words) == (0, draw(program) + "\n")


def test_an_svg(tmp_path):
    file = tmp_path / "ring.svg"
    assert run("ring", "--svg", str(file)) == (0, f"written {file}\n")
    assert file.read_text().startswith("<svg")


def test_a_new_algorithm_is_a_function_and_a_row(monkeypatch):
    """Proof, price, picture and refusals follow from the row."""

    def backwards(ranks, *, root=0):
        return rooted("broadcast", "backwards", lambda *given: linear(*given)[::-1], ranks, root)

    monkeypatch.setitem(ALGORITHMS, "broadcast/backwards", Algorithm(backwards))
    assert problems(build("backwards", 5, root=2)) == []
    assert cheapest("broadcast", load_cluster("rack-1gbex8"), size=8)
    assert run("backwards", "--ranks", "2") == (0, draw(backwards(2)) + "\n")
    assert "backwards" in run()[1]
    with pytest.raises(UserError, match="broadcast/backwards has no option pieces; it takes root"):
        draw_collective("backwards", pieces=2)


def test_all_are_listed():
    assert run() == (0, "\n".join(ALGORITHMS) + "\n")


WRONG = [
    ({"name": "rign"}, r"^no collective is called 'rign'; did you mean 'ring'\?$"),
    ({"name": "all_gather/rink"}, "did you mean 'all_gather/ring'"),
    ({"name": "bruck"}, "say all_gather/bruck or all_to_all/bruck$"),
    ({"name": "ring", "ranks": 0}, r"^--ranks is 0; a drawing has room for 1 to 64$"),
    ({"name": "ring", "ranks": 65}, "--ranks is 65"),
    ({"name": "segmented_ring", "pieces": 10**9}, "--pieces is 1000000000"),
    ({"name": "segmented_ring", "pieces": 0}, "--pieces is 0"),
    ({"name": "ring", "root": 1}, r"^all_reduce/ring has no option root; it takes none$"),
    ({"name": "tree", "root": 1}, "it takes pieces$"),
    ({"name": "broadcast/ring", "root": 4}, "^root is 4, and the ranks are 0 to 3$"),
    ({"name": "hypercube", "ranks": 6}, "a power of two of ranks, not 6; use 4 or 8, or"),
    ({"name": "all_gather/recursive_doubling", "ranks": 3}, "use 2 or 4, or all_gather/bruck"),
    ({"name": "neighbour_exchange", "ranks": 5}, "an even number of ranks, not 5; use 4 or 6, or"),
    ({"name": "hierarchical", "per_node": 3}, "4 ranks are no whole number of nodes of 3; use"),
    ({"name": "leader", "per_node": 0}, "no whole number of nodes of 0"),
    ({"name": "torus", "dims": "2x3"}, "a grid of 2x3 has not 4 devices; 2x2 has$"),
    ({"name": "mesh", "dims": "4"}, None),
    ({"name": "mesh", "dims": "two"}, r"^--dims is 'two'; write sizes with x between them"),
    ({"name": "mesh", "dims": "0x4"}, "a grid of 0x4 has not 4 devices"),
    ({"name": "ring", "dims": "2x2"}, "has no option dims"),
]


@pytest.mark.parametrize(("words", "sentence"), WRONG)
def test_what_is_refused(words, sentence, capsys):
    if sentence is None:
        draw_collective(**words)
        assert "all_reduce/mesh" in capsys.readouterr().out
        return
    with pytest.raises(UserError, match=sentence):
        draw_collective(**words)


def test_experts_of_a_negative_number_of_steps(tmp_path):
    with pytest.raises(UserError, match=r"--steps is -2; it must be at least 0, which is all"):
        draw_experts(tmp_path, steps=-2)
