"""A run whose service is unavailable, refuses requests or never answers: losses are logged, training never waits."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from evalstop_client import Limits
from evalstop_client.spool.segment import Entry

from tests.clients.fake_service import PROBLEM, Answer, FakeServer, FakeService
from tests.clients.programs import wait_until
from tests.clients.runs import FAST_LIMITS, METRICS, answer_on_path, list_messages, list_posts, open_run

pytestmark = pytest.mark.usefixtures("ended_runs")


def test_temporary_errors_are_retried_in_order(server: FakeServer, service: FakeService) -> None:
    """Errors of the service or of a proxy lose nothing and keep the order."""
    errors = [
        Answer(503, "<html>"),
        Answer(429, {}, {"retry-after": "0"}),
        Answer(404, "<html>", {"content-type": "text/html"}),
        Answer(200, "<html>sign in</html>"),
    ]
    service.scripted_answers = [
        answer_on_path(path, answer) for path in ("/runs", "/observations", "/checkpoints") for answer in errors
    ]
    with open_run(server) as run:
        run.log({"score": 1.0}, step=1)
        run.checkpoint("file:///a", step=1)
    assert [kind for kind, _ in list_posts(service)] == ["runs", "observations", "checkpoints", "finish"]
    assert run.dropped == 0


def test_refused_key_is_logged_once_and_retried(
    server: FakeServer, service: FakeService, caplog: pytest.LogCaptureFixture
) -> None:
    """A refused key is logged once, and everything arrives once it is accepted."""
    unknown = Answer(401, {"title": "who?"}, {"content-type": PROBLEM})
    service.scripted_answers = [unknown] * 4
    with open_run(server) as run:
        run.log({"score": 1.0}, step=1)
        wait_until(lambda: not service.scripted_answers)
        run.log({"score": 1.0}, step=2)
    assert len(service.find_run("a run").observations) == 2
    assert len([message for message in list_messages(caplog) if "key" in message]) == 1


def test_return_of_the_service_is_logged_as_its_absence_was(
    server: FakeServer, service: FakeService, caplog: pytest.LogCaptureFixture
) -> None:
    """Who was warned that the service is unavailable reads, at the same level, that it is back."""
    service.scripted_answers = [Answer(503, {})]
    with open_run(server) as run:
        run.log({"score": 1.0}, step=1)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [message.partition(";")[0] for message in warnings] == [
        "evalstop: the service is unavailable",
        "evalstop: the service is back",
    ]


def test_flush_outlasts_an_answer_in_flight(server: FakeServer, service: FakeService) -> None:
    """A 401 to a request that began before the flush does not end the flush: the key is tried once more."""
    request_started = threading.Event()

    def answer_late(_path: str, _body: Any) -> Answer:
        request_started.set()
        time.sleep(0.5)
        return Answer(401, {"title": "who?"}, {"content-type": PROBLEM})

    service.scripted_answers = [answer_late]
    with open_run(server) as run:
        run.log({"score": 1.0}, step=1)
        assert request_started.wait(60)
    assert len(service.find_run("a run").observations) == 1


def test_refused_key_does_not_delay_the_end(server: FakeServer, service: FakeService, tmp_path: Path) -> None:
    """With a key that is never accepted the run ends soon, and its data stays in the spool."""
    with open_run(server, key="esk_wrong", limits=Limits(flush_seconds=120)) as run:
        run.log({"score": 1.0}, step=1)
    assert list((tmp_path / "spool").glob("*/*.jsonl"))
    assert service.posts == []


@pytest.mark.parametrize("names_bad_observations", [True, False])
def test_refused_observations_are_dropped(
    server: FakeServer, service: FakeService, caplog: pytest.LogCaptureFixture, names_bad_observations: bool
) -> None:
    """An invalid observation is counted as dropped and the rest of its batch is sent, named or not."""
    service.refuse_metric, service.names_bad_observations = "invalid", names_bad_observations
    with open_run(server) as run:
        for step in range(50):
            run.log({"score": 1.0, **({"invalid": 1.0} if step % 20 == 7 else {})}, step=step)
    assert run.dropped == 3
    assert len(service.find_run("a run").observations) == 50
    (message,) = [message for message in list_messages(caplog) if "refused" in message]
    assert "422" in message


def test_oversized_batch_is_halved(server: FakeServer, service: FakeService) -> None:
    """A batch that a proxy refuses with 413 is sent in smaller ones."""

    def at_most_ten(path: str, body: dict[str, Any]) -> Answer | None:
        return Answer(413, "<html>too large</html>") if len(body.get("observations", [])) > 10 else None

    service.scripted_answers = [at_most_ten] * 100
    with open_run(server) as run:
        run.log({f"m{number}": 1.0 for number in range(100)}, step=1)
    assert len(service.find_run("a run").observations) == 100


def test_refused_run_is_logged_and_ends(server: FakeServer, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A run that cannot be opened is logged as not watched, as an error, since a trainer may log only errors. What it
    logged is counted as dropped."""
    with open_run(server, metrics=METRICS):
        pass
    with open_run(server, metrics={"score": {"role": "proxy"}}, resume="allow", limits=Limits(flush_seconds=60)) as run:
        run.log({"score": 1.0}, step=1)
    (record,) = [record for record in caplog.records if "NOT being watched" in record.getMessage()]
    assert (record.levelname, "other metrics" in record.getMessage()) == ("ERROR", True)
    assert run.dropped == 2
    assert list((tmp_path / "spool").glob("*/*")) == []


def test_refused_run_keeps_no_earlier_run_alive(server: FakeServer, service: FakeService, tmp_path: Path) -> None:
    """After it has sent an earlier run's spool, a run that the service refuses sends no heartbeats for that one."""
    service.intercept = lambda path, body: Answer(503, {})
    with open_run(server, spool_folder=tmp_path, limits=Limits(flush_seconds=0)) as earlier:
        earlier.log({"score": 1.0}, step=1)
    service.intercept = lambda path, body: (
        Answer(422, {"title": "no such policy"}, {"content-type": PROBLEM}) if body.get("policy") == "absent" else None
    )
    with open_run(server, spool_folder=tmp_path, policy="absent") as run:
        assert run.flush(30)
        beats = service.heartbeats
        time.sleep(10 * FAST_LIMITS.poll_seconds)
        assert service.heartbeats == beats
    assert service.find_run("a run").observations


def test_forgotten_run_is_opened_again(server: FakeServer, service: FakeService) -> None:
    """A service restored from an older backup gets the run opened anew."""
    with open_run(server) as run:
        run.log({"score": 1.0}, step=1)
        assert run.flush()
        with service.lock:
            service.runs.clear()
        run.log({"score": 1.0}, step=2)
    assert [step for _, _, step in service.find_run("a run").observations] == [2]


def test_forgotten_run_is_opened_again_while_it_is_idle(server: FakeServer, service: FakeService) -> None:
    """A run that logs nothing, as in a long eval, is opened again after the service lost it: a stop can reach it."""
    with open_run(server) as run:
        assert run.flush()
        with service.lock:
            service.runs.clear()
        wait_until(lambda: service.runs)


def test_invalid_unicode_is_sent_escaped(server: FakeServer, service: FakeService) -> None:
    """A path or metric that is not valid UTF-8 is sent with escapes."""
    with open_run(server) as run:
        run.checkpoint(os.fsdecode(b"/ckpt/\xff"), step=1)
        run.log({"\ud800": 1.0}, step=1)
    assert service.find_run("a run").checkpoints == {1: "/ckpt/\udcff"}
    assert len(service.find_run("a run").observations) == 1


def test_conflict_is_logged_once(server: FakeServer, caplog: pytest.LogCaptureFixture) -> None:
    """A step logged again with another value is warned about once."""
    with open_run(server) as run:
        for value in (1.0, 2.0, 3.0):
            run.log({"score": value}, step=1)
    assert len([message for message in list_messages(caplog) if "logged twice" in message]) == 1


def test_full_queue_drops_observations_and_warns_once(
    server: FakeServer, service: FakeService, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """When memory and disk are full, observations are dropped with one warning of each kind."""
    (tmp_path / "spool").write_text("a file where the folder should be")
    service.scripted_answers = [lambda path, body: Answer(503, {})] * 1_000
    with open_run(server, limits=Limits(queue_entries=10, flush_seconds=0)) as run:
        for step in range(500):
            run.log({"score": 1.0}, step=step)
        run.checkpoint("file:///a", step=500)
        wait_until(lambda: run.dropped > 0)
        assert run.dropped < 500
    warnings = [message for message in list_messages(caplog) if "dropped" in message]
    assert warnings, "no warning was logged"
    assert len(warnings) == len(set(warnings)), "a warning was logged twice"


def test_run_that_does_not_wait_for_the_service_is_spooled(server: FakeServer, tmp_path: Path) -> None:
    """A run that ends without waiting for its service is in the spool as a whole."""
    with open_run(server, limits=Limits(flush_seconds=0), key="esk_wrong") as run:
        for step in range(5):
            run.log({"score": 1.0}, step=step)
    (segment,) = (tmp_path / "spool").glob("*/*.jsonl")
    kinds = [json.loads(line)["to"] for line in segment.read_text().splitlines()[1:]]
    assert kinds == ["open", *["observations"] * 5, "finish"]
    assert run.dropped == 0


@pytest.mark.parametrize(
    ("flush_seconds", "answer_seconds", "evals", "all_sent"), [(3, 1.1, 1, True), (0.1, 0.05, 20, False)]
)
def test_end_waits_longer_while_the_service_accepts_data(
    server: FakeServer,
    service: FakeService,
    caplog: pytest.LogCaptureFixture,
    flush_seconds: float,
    answer_seconds: float,
    evals: int,
    all_sent: bool,
) -> None:
    """A backlog that a slow service accepts is sent beyond `flush_seconds`, but not beyond six times as long."""

    def answer_slowly(_path: str, _body: Any) -> None:
        time.sleep(answer_seconds)

    with open_run(server, limits=Limits(flush_seconds=flush_seconds)) as run:
        assert run.flush(60)
        service.intercept = answer_slowly
        for step in range(evals):
            run.log({"score": 1.0}, step=step)
            run.checkpoint(f"file:///{step}", step=step)
    assert ("finish" in [kind for kind, _ in list_posts(service)]) is all_sent
    assert any("not everything was sent" in message for message in list_messages(caplog)) is not all_sent


@pytest.mark.filterwarnings("ignore:Exception ignored in. <_io.FileIO")  # the segment that hangs is never closed
def test_finish_ends_although_the_disk_hangs(server: FakeServer, caplog: pytest.LogCaptureFixture) -> None:
    """What a write holds up is said to be possibly lost; it is kept if the disk answers later."""
    hangs, goes_on = threading.Event(), threading.Event()

    class HangingEntry(Entry):
        def line(self) -> bytes:
            hangs.set()
            goes_on.wait(60)
            return super().line()

    run = open_run(server, limits=Limits(flush_seconds=0))
    run._put_entry(HangingEntry("resume", {"step": 0}))
    assert hangs.wait(60)
    run.finish()
    assert any("the disk hangs" in message for message in list_messages(caplog))
    goes_on.set()
    assert run.dropped == 0
