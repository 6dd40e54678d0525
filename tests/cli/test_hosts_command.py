"""What the commands take that measure between hosts, and what a run takes where none can be."""

import pytest
from small_runs import RECIPE
from typer.testing import CliRunner

from howdah.base.errors import UserError
from howdah.cli import hosts
from howdah.cli.commands import app
from howdah.comm import rendezvous, selection
from howdah.config.recipe import Machine, load_run
from howdah.plan.comm import Hosts
from howdah.sim.selector import is_auto

WORDS = ["comm.trust=network", "comm.interface=lo", "comm.wire=gloo"]


class Here:
    """Stands where the transport does of ranks on two hosts."""

    rank = 0

    def close(self):
        pass


@pytest.mark.parametrize("command", [["doctor"], ["bench", "collectives"]])
def test_the_ranks_that_measure_are_connected_as_those_of_a_run(command, monkeypatch):
    """They took none of a run's settings, and so could not join on a network that is trusted."""
    given = []

    def join(*_, hosts, **__):
        given.append(hosts)
        raise UserError("nobody is there")

    monkeypatch.setattr(rendezvous, "join", join)
    monkeypatch.setattr(hosts, "launched", lambda: True)
    found = CliRunner().invoke(app, [*command, "--hosts", *WORDS])
    assert str(found.exception) == "nobody is there"
    assert given == [Hosts("gloo", "network", "lo")]


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("train.steps=3", "unknown key 'train'"),
        ("comm.sparse=true", "unknown key 'comm.sparse'"),
        ("comm.trust=all", "comm.trust is 'all'; it must be 'secret' or 'network'"),
        ("eth0", "'eth0' changes nothing; write key=value"),
    ],
)
def test_other_words_are_refused_in_a_sentence(word, told):
    with pytest.raises(UserError) as error:
        hosts.hosts_in([word])
    assert str(error.value).startswith("--hosts takes comm.wire, comm.trust and comm.interface: ")
    assert told in str(error.value)


@pytest.mark.parametrize("command", [["doctor"], ["bench", "collectives"]])
def test_words_without_hosts_are_refused(command):
    found = CliRunner().invoke(app, [*command, "comm.wire=tcp"])
    assert str(found.exception) == (
        f"'comm.wire=tcp' is for {' '.join(command)} --hosts: give that too"
    )


def test_hosts_of_unequal_numbers_of_ranks_take_the_direct_way(tmp_path, monkeypatch):
    """As `connect` does, and the docs say: train and verify refused to start."""
    (tmp_path / "small.toml").write_text(RECIPE.format(text=tmp_path / "text"))
    run = load_run(tmp_path / "small.toml", ["comm.algorithm=auto", "layout=dp*"])
    assert is_auto(run.comm.algorithm)

    def unequal(transport):
        raise UserError("hosts of 1 and of 2 ranks")

    monkeypatch.setattr(rendezvous, "join", lambda **_: Here())
    monkeypatch.setattr(selection, "topology_of", unequal)
    machine = Machine(3, 2, cores=1, cuda=0, cache=tmp_path)
    found, why = hosts.with_algorithms(run, machine)
    assert not found.comm.algorithm and not is_auto(found.comm.algorithm)
    assert why == "none: hosts of 1 and of 2 ranks"
