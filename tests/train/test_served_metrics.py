"""What is observed of a run with servers, from the reports of its workers and servers."""

import pytest
from small_serving import serving_here

from howdah.train import served, served_worker, serving
from howdah.train.served_metrics import histograms_of, measured, scalars_of
from howdah.train.tensorboard import Board

STEPS = {
    0: {"step": 7, "loss": 30.0, "tokens": 10.0, "seconds": 2.0, "waited": 0.5, "queue": 3},
    1: {"step": 9, "loss": 10.0, "tokens": 10.0, "seconds": 1.0, "waited": 0.5, "queue": 1},
    2: {"step": 8, "loss": 20.0, "tokens": 20.0, "seconds": 1.0, "waited": 0.5, "queue": 2},
}
SERVERS = {
    0: {
        "server": 0,
        "ages": {"0": {"0": 2}, "1": {"3": 1}},
        "push_rate": 5.0,
        "pull_rate": 1.0,
        "queue": 4,
    },
    1: {"server": 1, "ages": {"1": {"0": 1}}, "push_rate": 7.0, "pull_rate": 1.0, "missed": 2},
}


def test_a_row_has_what_all_workers_and_servers_say():
    row = measured(STEPS, SERVERS)
    assert row["loss"] == 60 / 40 and row["tps"] == 5 + 10 + 20
    assert row["staleness"] == {"0": 3, "3": 1} and row["stale"] == 3 / 4 and row["oldest"] == 3
    assert [one["staleness"] for one in row["servers"]] == [{"0": 2, "3": 1}, {"0": 1}]
    assert [one["staleness"] for one in row["workers"]] == [{"0": 2}, {"0": 1, "3": 1}, {}]
    assert [one["stale"] for one in row["workers"]] == [0.0, 1.5, 0.0]
    assert row["apart"] == 2 and row["queue"] == 3
    assert (row["slowest"], row["slower"]) == (0, 1.5 / 0.5)
    assert (row["push_rate"], row["pull_rate"]) == (12.0, 2.0)
    assert [one["worker"] for one in row["workers"]] == [0, 1, 2]


def test_one_worker_has_nobody_to_be_slower_than():
    row = measured({4: STEPS[0]}, {})
    assert (row["slowest"], row["slower"], row["stale"], row["oldest"]) == (4, 1.0, 0.0, 0)


def test_boards_have_a_value_for_each_worker_and_server():
    found = scalars_of(measured(STEPS, SERVERS))
    assert found["loss_metrics/global_avg_loss"] == pytest.approx(1.5)
    assert found["served/worker 1 waited"] == 0.5 and found["served/server 0 queue"] == 4
    assert "served/server 1 queue" not in found  # it has not said it
    assert found["served/server 1 missed"] == 2.0


@pytest.mark.parametrize("kind", ["bsp", "asp"])
def test_a_server_counts_what_it_was_pushed_and_asked_for(make_job, kind, monkeypatch):
    """And a rate is what was counted, over the time since it was looked at last."""
    clock = [100.0]
    monkeypatch.setattr(served, "perf_counter", lambda: clock[0])
    job = make_job(
        *("counted", "layout=server2", "method.grad_clip=0.0", "train.steps=3"),
        *(f'method.sync={{kind = "{kind}", workers = 1}}', "train.save_every=0"),
    )
    corpus = serving.corpus_of(job)
    with serving_here(job) as (servers, way):
        start = serving.start_of(job, -1, corpus)
        served_worker.work(job, 0, way, start=start, corpus=corpus, tell=lambda said: None)
        clock[0] += 2.0
        found = [one.numbers() for one in servers]
        later = servers[0].numbers()
    width = job.plan.master_bytes
    for server, told in zip(servers, found, strict=True):
        chunks = server.desk.shard.chunks
        size = sum(chunk.length for chunk in chunks) * width
        assert (told["pushes"], told["pulls"]) == (3 * len(chunks), 3 * len(chunks))
        assert (told["push_rate"], told["pull_rate"]) == (3 * size / 2, 3 * size / 2)
        assert sum(told["ages"][0].values()) == 3 * len(chunks)
        assert kind == "asp" or told["ages"] == {0: {0: 3 * len(chunks)}}
        assert told["queue"] >= 1 and told["queued"] == told["waiting"] == 0
        assert told["clocks"] == {0: 3}
    assert (later["push_rate"], later["pushes"]) == (0.0, found[0]["pushes"])


def test_what_waits_now_is_the_most_of_all_ends():
    waiting = {0: {**STEPS[0], "queued": 1}, 1: {**STEPS[1], "queued": 0}}
    row = measured(waiting, {0: {**SERVERS[0], "queued": 4}})
    assert row["queued"] == 4
    found = scalars_of(row)
    assert (found["served/worker 0 queued"], found["served/server 0 queued"]) == (1.0, 4.0)


def test_staleness_is_a_histogram_that_tensorboard_reads(tmp_path):
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    ).EventAccumulator
    row = measured(STEPS, SERVERS)
    Board(tmp_path, step=0).add(scalars_of(row), 7, histograms_of(row))
    Board(tmp_path, step=7).add({}, 8, {"nothing yet": {}})
    read = accumulator(str(tmp_path))
    read.Reload()
    names = "worker 0", "worker 1", "server 0", "server 1"
    assert {*read.Tags()["histograms"]} >= {f"served/{one} staleness" for one in names}
    (event,) = read.Histograms("served/staleness")
    found = event.histogram_value
    assert event.step == 7
    assert (found.min, found.max, found.num, found.sum, found.sum_squares) == (0, 3, 4, 3, 9)
    assert [*zip(found.bucket_limit, found.bucket, strict=True)] == [
        (0.5, 3),
        (1.5, 0),
        (2.5, 0),
        (3.5, 1),
    ]
