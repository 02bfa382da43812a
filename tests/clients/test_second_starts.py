"""A name whose run has ended, or whose earlier start left something to send, is opened again."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from evalstop_client import Limits

from tests.clients.fake_service import Answer, FakeServer, FakeService
from tests.clients.programs import wait_until
from tests.clients.runs import answer_on_path, list_messages, open_run

pytestmark = pytest.mark.usefixtures("ended_runs")


def test_second_start_opens_a_new_run(
    server: FakeServer, service: FakeService, caplog: pytest.LogCaptureFixture
) -> None:
    """Opening a name whose run has ended opens another run, and a warning says its name and how to resume."""
    with open_run(server) as first:
        first.log({"score": 1.0}, step=1)
    with open_run(server) as second:
        assert second.flush()
        second.log({"score": 2.0}, step=1)
        assert (first.name, second.name) == ("a run", "a run-2")
    assert list(service.find_run("a run").observations.values()) == [1.0]
    assert list(service.find_run("a run-2").observations.values()) == [2.0]
    (message,) = list_messages(caplog)
    assert all(part in message for part in ("this run is called 'a run-2'", 'resume="allow"'))


@pytest.mark.parametrize("resume", ["allow", "must"])
def test_resume_option_continues_an_ended_run(
    server: FakeServer, service: FakeService, caplog: pytest.LogCaptureFixture, resume: str
) -> None:
    """With `resume` the ended run continues, and later observations form a new attempt."""
    with open_run(server) as first:
        first.log({"score": 1.0}, step=1)
    with open_run(server, resume=resume) as second:
        second.resume(step=0)
        second.log({"score": 2.0}, step=1)
    assert second.id == first.id
    assert service.find_run("a run").observations == {(1, "score", 1): 1.0, (2, "score", 1): 2.0}
    assert list_messages(caplog) == []


def test_reporting_to_an_ended_run_is_logged_as_an_error(server: FakeServer, caplog: pytest.LogCaptureFixture) -> None:
    """A run that another process has finished logs one error with the next answer."""
    with open_run(server) as first, open_run(server) as second:
        first.log({"score": 1.0}, step=1)
        assert first.flush()
        assert second.flush()
        second.finish()
        for step in (2, 3):
            first.log({"score": 1.0}, step=step)
            assert first.flush()
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1
    assert "'a run' has ended (completed)" in errors[0]


def test_earlier_runs_spool_does_not_stop_the_next_run(server: FakeServer, service: FakeService) -> None:
    """Spooled data of an earlier run is sent to that run, whose stop is not taken over."""
    service.scripted_answers = [answer_on_path("/observations", Answer(503, {}))] * 1000
    first = open_run(server, limits=Limits(flush_seconds=0.2))
    first.log({"score": 1.0}, step=7)
    first._close_run()
    stopped = service.find_run("a run")
    assert stopped.observations == {}
    stopped.status, service.stop_at_step = "stopped", 7

    def refuse_others(path: str, body: dict[str, Any]) -> Answer | None:
        return Answer(503, {}) if path.endswith("/runs") and body != stopped.opening else None

    service.scripted_answers = [refuse_others] * 1000
    with open_run(server, limits=Limits(flush_seconds=0.2, poll_seconds=0.05)) as second:
        wait_until(lambda: len(stopped.observations) == 1)
        wait_until(lambda: len(service.scripted_answers) < 1000)
        assert (second.should_stop, second.id) == (False, None)
        service.scripted_answers = []
        second.flush(60)
        assert (second.should_stop, second.name) == (False, "a run-2")


@pytest.mark.parametrize(("job", "order"), [("2", ["new", "new", "old", "old"]), ("1", ["old", "old", "new", "new"])])
def test_new_run_does_not_wait_for_what_an_earlier_run_left(
    server: FakeServer, service: FakeService, monkeypatch: pytest.MonkeyPatch, job: str, order: list[str]
) -> None:
    """What a run of another job left is sent last, after that run was opened; of the same job, it is sent first."""
    limits = Limits(flush_seconds=0.2, batch_observations=2)
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    service.scripted_answers = [answer_on_path("", Answer(503, {}))] * 1000
    first = open_run(server, limits=limits)
    for step in range(4):
        first.log({"old": 1.0}, step=step)
    first._close_run()
    monkeypatch.setenv("SLURM_JOB_ID", job)
    second = open_run(server, limits=limits)
    for step in range(4):
        second.log({"new": 1.0}, step=step)
    second.flush()
    service.scripted_answers = []
    assert second.flush(30)
    assert second.name == ("a run" if job == "1" else "a run-2")
    posted = [body["observations"] for path, body in service.posts if path.endswith("/observations")]
    assert [points[0]["metric"] for points in posted] == order
    second.finish()
