"""Runs of servers and workers behind TLS: all of their connections, or none that is let in."""

from dataclasses import asdict, replace
from unittest.mock import patch

import pytest
from made_certificates import NEEDS_OPENSSL, made
from small_gatherings import SERVED, Members, elsewhere, gathering
from small_runs import tensors

from howdah.base.errors import UserError
from howdah.cli import members as commands
from howdah.comm import tls
from howdah.train import member
from howdah.train.member import serve_there, work_there
from howdah.train.serving import corpus_of

SYNC = 'method.sync={kind = "bsp", workers = 2, replicas = 1}'
pytestmark = NEEDS_OPENSSL


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    return made(tmp_path_factory.mktemp("tls"))


def spelled(files):
    inside = ", ".join(f'{name} = "{path}"' for name, path in asdict(files).items())
    return f"comm.tls={{{inside}}}"


def trained(job, tmp_path):
    """Trains with members that are threads here; how many ends of connections were relayed."""
    corpus, members, carry, ends = corpus_of(job), Members(), tls._carry, []

    def counted(*given):
        ends.append(1)
        carry(*given)

    with patch.object(tls, "_carry", counted), gathering(job) as (run, address):
        for number in range(2):
            for role, play in (("s", serve_there), ("w", work_there)):
                mine = elsewhere(job, tmp_path, f"{job.folder.name}-{role}{number}")
                members.start(play, mine, corpus, address)
        assert run.see_through() == 0
    assert members.join() == []
    return len(ends)


def test_all_connections_of_a_run_are_relayed_and_it_trains_the_same_weights(
    make_job, tmp_path, certificates
):
    words = (*SERVED, SYNC, "train.steps=2", "train.save_every=0")
    sealed = spelled(certificates("member"))
    assert trained(make_job("plain", *words), tmp_path) == 0
    # lines of 4 members, 2 workers at 2 servers, 2 replicas: two ends each
    assert trained(make_job("sealed", *words, sealed), tmp_path) >= 2 * (4 + 4 + 2)
    one, other = (tensors(tmp_path / name, 2) for name in ("plain", "sealed"))
    assert one.keys() == other.keys() and len(one) > 20
    assert all((other[name] == tensor).all() for name, tensor in one.items())


@pytest.mark.parametrize("who", ["stranger", "plain"])
def test_a_member_without_a_certificate_of_the_authority_does_not_join(make_job, certificates, who):
    words = (*SERVED, SYNC, "train.steps=2")
    job = make_job("sealed", *words, spelled(certificates("member")))
    others = {"stranger": [spelled(certificates("stranger"))], "plain": []}
    other, corpus = make_job("other", *words, *others[who]), corpus_of(job)
    with gathering(job) as (run, address), patch.object(member, "PATIENCE", 0.3):
        members = Members()
        members.start(work_there, other, corpus, address)
        while members.threads[0].is_alive():
            for sock, _ in run._door.look(0.01):
                pytest.fail(f"{sock} was let in")
    (error,) = members.join()
    assert isinstance(error, UserError) and "nobody at" in str(error)


def test_what_is_wrong_with_the_files_is_said_before_a_run_starts(make_job, certificates):
    good = certificates("member")
    job = make_job("wrong", *SERVED, SYNC, spelled(replace(good, ca=good.key)))
    with pytest.raises(UserError, match=r"comm.tls.ca .*: no certificate in PEM form"):
        commands.require_certificates(job)
    with pytest.raises(UserError, match=r"comm\.tls is for servers and workers of method.sync"):
        make_job("ranks", "layout=dp2", spelled(good))
    job = make_job("good", *SERVED, SYNC, spelled(good))
    commands.require_certificates(job)
    assert job.plan.comm.tls == good
