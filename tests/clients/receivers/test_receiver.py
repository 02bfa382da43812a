"""The receiver over real sockets: what it does once, reports, retries and never waits for."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import httpx
import pytest
from evalstop_client.receivers.stop.execution import ReportClient
from evalstop_client.receivers.stop.job_control import StopRequest
from evalstop_client.receivers.stop.journal import Journal, JournalEntry
from evalstop_client.receivers.stop.state_machine import Phase, Report, Stop
from evalstop_service.web.api.decisions import ReportIn
from evalstop_service.web.api.json_body import load

from tests.clients.fake_service import KEY, PROBLEM, Answer, FakeServer, FakeService
from tests.clients.programs import wait_until
from tests.clients.receivers.conformance import make_stop_request
from tests.clients.receivers.fake_scheduler import UNAVAILABLE, FakeScheduler
from tests.clients.receivers.listening_receiver import SHORT_TIMEOUTS, ListeningReceiver, make_receiver
from tests.clients.webhooks import SECRET, make_event, make_stop_event, post_event, sign_event

ESCALATION = make_event("run.stop_escalated", {})


def test_stop_is_accepted_then_reported(listener: ListeningReceiver, service: FakeService) -> None:
    """The webhook is answered before the job is found; the report follows when the job has ended."""
    listener.scheduler.may_answer.clear()
    assert post_event(listener.url, make_stop_event({"a": "b"})).status_code == 202
    assert service.reports == []
    listener.scheduler.may_answer.set()
    ((decision_id, report),) = wait_until(lambda: service.reports)
    assert decision_id == "decision-1"
    assert report["state"] == "confirmed"
    assert report["reason"] == "the job ended after it was cancelled"
    assert report["details"].items() >= {"job": "7", "user": "ann", "state": "ENDED", "exit_status": -15}.items()
    assert listener.scheduler.calls == ["cancel"]
    (request,) = listener.scheduler.requests
    assert (request.run_name, request.labels, request.reason) == ("a run", {"a": "b"}, "3 declines in a row")


def test_stop_is_acknowledged_once_the_job_is_found(listener: ListeningReceiver, service: FakeService) -> None:
    """Once the job is found the service is told how many seconds the job has to save."""
    post_event(listener.url, make_stop_event({"a": "b"}))
    ((decision_id, report),) = wait_until(lambda: service.acknowledgements)
    assert decision_id == "decision-1"
    assert report["details"].items() >= {"job": "7", "user": "ann"}.items()
    assert report["expected_seconds"] == listener.receiver.context.timeouts.checkpoint_seconds


def test_acknowledgement_does_not_delay_the_stop(listener: ListeningReceiver, service: FakeService) -> None:
    """A service that does not answer the acknowledgement does not delay the stop or its report."""
    service.accepts_acknowledgements.clear()
    post_event(listener.url, make_stop_event({}))
    ((_, report),) = wait_until(lambda: service.reports)
    assert report["state"] == "confirmed"
    assert service.acknowledgements == []
    service.accepts_acknowledgements.set()
    assert wait_until(lambda: service.acknowledgements)


def test_gone_job_is_not_acknowledged(listener: ListeningReceiver, service: FakeService) -> None:
    """A job that is already gone is reported without an acknowledgement."""
    listener.scheduler.gone = True
    post_event(listener.url, make_stop_event({}))
    assert wait_until(lambda: service.reports)
    assert service.acknowledgements == []


def test_report_is_retried_until_accepted(listener: ListeningReceiver, service: FakeService) -> None:
    """A report that gets 5xx is sent again until the service accepts it."""
    service.scripted_answers = [Answer(503, {}), Answer(500, {})]
    post_event(listener.url, make_stop_event({}))
    assert wait_until(lambda: service.reports)


def test_refused_report_is_not_retried(listener: ListeningReceiver, service: FakeService) -> None:
    """A report that gets 404 is not sent again."""
    service.scripted_answers = [Answer(404, {"title": "no such decision"}, {"content-type": PROBLEM})]
    post_event(listener.url, make_stop_event({}))
    wait_until(lambda: listener.scheduler.requests)
    assert listener.receiver.wait_idle(20)
    assert service.scripted_answers == []
    assert service.reports == []


def test_job_that_survives_is_reported_as_failed_then_confirmed(
    listener: ListeningReceiver, service: FakeService
) -> None:
    """A job that survives the kill is reported as failed, and as confirmed if it ends later."""
    listener.scheduler.ends_on = None
    post_event(listener.url, make_stop_event({}))
    ((_, failed),) = wait_until(lambda: service.reports)
    assert failed["state"] == "failed"
    assert "RUNNING" in failed["reason"]
    assert listener.scheduler.calls[:2] == ["cancel", "kill"]
    listener.scheduler.gone = True
    wait_until(lambda: len(service.reports) == 2)
    assert service.reports[1][1]["state"] == "confirmed"


@pytest.mark.parametrize("error", [UNAVAILABLE, RuntimeError("it hangs")])
def test_unavailable_scheduler_is_retried(listener: ListeningReceiver, service: FakeService, error: Exception) -> None:
    """A scheduler that is unavailable, or that raises, is reported as failed and retried until it answers."""
    listener.scheduler.error = error
    post_event(listener.url, make_stop_event({}))
    ((_, failed),) = wait_until(lambda: service.reports)
    assert (failed["state"], listener.scheduler.calls) == ("failed", [])
    listener.scheduler.error = None
    wait_until(lambda: len(service.reports) == 2)
    assert (service.reports[1][1]["state"], listener.scheduler.calls) == ("confirmed", ["cancel"])


def test_refused_stop_may_be_requested_again(listener: ListeningReceiver, service: FakeService) -> None:
    """A stop outside the allow-list fails; the same event is obeyed once the allow-list has changed."""
    listener.scheduler.refusal = "not on the allow-list"
    post_event(listener.url, make_stop_event({}))
    ((_, report),) = wait_until(lambda: service.reports)
    assert (report["state"], report["reason"], listener.scheduler.calls) == ("failed", "not on the allow-list", [])
    assert listener.receiver.wait_idle(20)
    listener.scheduler.refusal = None
    assert post_event(listener.url, make_stop_event({})).status_code == 202
    wait_until(lambda: len(service.reports) == 2)
    assert listener.scheduler.calls == ["cancel"]


class RepeatingJournal(Journal):
    """Calls `repeat` once as soon as a stop is recorded as done, before its thread has ended."""

    repeat: Callable[[], object] | None = None

    def record_stop(self, request: StopRequest, stop: Stop) -> None:
        super().record_stop(request, stop)
        if stop.phase is Phase.DONE and self.repeat is not None:
            repeat, self.repeat = self.repeat, None
            repeat()


def test_stop_that_starts_again_as_the_earlier_one_ends_is_in_progress(listener: ListeningReceiver) -> None:
    """A failed stop that is requested again just as it ends is waited for, like any other."""
    journal, receiver = RepeatingJournal(None), listener.receiver
    receiver.context = replace(receiver.context, journal=journal)

    def request_again() -> None:
        listener.scheduler.may_answer.clear()
        assert post_event(listener.url, make_stop_event({})).status_code == 202

    def count_threads() -> int:
        return sum(thread.name == "stop decision-1" for thread in threading.enumerate())

    journal.repeat = request_again
    listener.scheduler.refusal = "not on the allow-list"
    post_event(listener.url, make_stop_event({}))
    wait_until(lambda: len(listener.scheduler.requests) == 2 and count_threads() == 1)
    assert not receiver.wait_idle(0)
    listener.scheduler.may_answer.set()
    assert receiver.wait_idle(20)


def test_job_of_another_receiver_is_ignored(listener: ListeningReceiver, service: FakeService) -> None:
    """A stop for another receiver's job is neither carried out nor reported."""
    listener.scheduler.is_mine = False
    assert post_event(listener.url, make_stop_event({})).status_code == 202
    wait_until(lambda: listener.scheduler.requests)
    assert listener.receiver.wait_idle(20)
    assert listener.receiver.context.journal.is_empty
    assert service.requests == []


def test_decision_is_obeyed_once(listener: ListeningReceiver) -> None:
    """A repeated decision, with the same webhook id or another, during the stop or after it, changes nothing."""
    listener.scheduler.may_answer.clear()
    assert post_event(listener.url, make_stop_event({})).status_code == 202
    assert post_event(listener.url, make_stop_event({})).status_code == 200
    listener.scheduler.may_answer.set()
    assert listener.receiver.wait_idle(20)
    assert post_event(listener.url, make_stop_event({})).json() == {"repeat": "decision-1"}
    assert post_event(listener.url, make_stop_event({}), webhook_id="msg_2").status_code == 200
    assert listener.receiver.wait_idle(20)
    assert listener.scheduler.calls == ["cancel"]


def test_decision_is_obeyed_once_across_a_restart(listener: ListeningReceiver, service: FakeService) -> None:
    """A restarted receiver continues the stop and repeats no call to the scheduler."""
    listener.scheduler.ends_on = None
    post_event(listener.url, make_stop_event({}))
    wait_until(lambda: listener.scheduler.calls)
    assert listener.receiver.shut_down(20)
    assert post_event(listener.url, make_stop_event({}, "decision-2")).status_code == 503
    restarted = listener.make_next_receiver()
    listener.scheduler.gone = True
    restarted.start()
    ((_, report),) = wait_until(lambda: service.reports)
    assert report["state"] == "confirmed"
    assert restarted.wait_idle(20)
    assert listener.scheduler.calls == ["cancel"]
    assert len(listener.scheduler.requests) == 1


def test_escalation_kills_the_job_at_once(listener: ListeningReceiver, service: FakeService) -> None:
    """`run.stop_escalated` during a stop kills the job before the rest of its grace period."""
    listener.scheduler.ends_on = "kill"
    long_timeouts = replace(SHORT_TIMEOUTS, cancel_seconds=1_000, give_up_seconds=2_000)
    listener.receiver.context = replace(listener.receiver.context, timeouts=long_timeouts)
    post_event(listener.url, make_stop_event({}))
    wait_until(lambda: listener.scheduler.calls)
    assert post_event(listener.url, ESCALATION, webhook_id="msg_2").json() == {"escalated": "decision-1"}
    ((_, report),) = wait_until(lambda: service.reports)
    assert report["reason"] == "the job ended after it was forced to"


def test_escalation_that_arrives_with_its_stop_is_not_lost(server: FakeServer) -> None:
    """An escalation that arrives while its stop is written to the journal escalates the stop."""

    class SlowJournal(Journal):
        def begin_stop(self, request: StopRequest, at: float) -> JournalEntry | None:
            entry = super().begin_stop(request, at)
            if entry is not None:
                escalating.start()
                escalating.join(0.5)
            return entry

    replies: list[Mapping[str, Any]] = []
    receiver = make_receiver(FakeScheduler(ends_on="kill"), SlowJournal(None), server, [SECRET])

    def receive(event: dict[str, Any], webhook_id: str) -> None:
        replies.append(receiver.receive(*sign_event(event, webhook_id), time.time()).body)

    escalating = threading.Thread(target=receive, args=(ESCALATION, "msg_2"))
    receive(make_stop_event({}), "msg_1")
    escalating.join()
    assert replies == [{"accepted": "decision-1"}, {"escalated": "decision-1"}]
    assert receiver.shut_down(20)


def test_unwritable_journal_gets_503(listener: ListeningReceiver) -> None:
    """A stop that cannot be journaled is answered 503 and does not begin."""
    folder = listener.journal.folder
    assert folder is not None
    folder.rename(folder.with_name("elsewhere"))
    assert post_event(listener.url, make_stop_event({})).status_code == 503
    folder.with_name("elsewhere").rename(folder)
    assert post_event(listener.url, make_stop_event({})).status_code == 202


def test_other_event_types_are_ignored(listener: ListeningReceiver) -> None:
    """An event of another type gets 200 and is named in the answer."""
    answer = post_event(listener.url, {"type": "run.suspected", "data": {}})
    assert (answer.status_code, answer.json()) == (200, {"ignored": "run.suspected"})


def test_only_livez_can_be_read(listener: ListeningReceiver) -> None:
    """/livez is open; any other page gets 404 and any other method 501."""
    assert httpx.get(listener.url + "livez", timeout=60).status_code == 200
    assert httpx.get(listener.url, timeout=60).status_code == 404
    assert httpx.put(listener.url, timeout=60).status_code == 501


@pytest.mark.parametrize(
    ("value", "reported"),
    [
        ("\x1b[31mgone\x1b[0m\r\n", " [31mgone [0m \n"),
        ("half of a pair: \ud800", "half of a pair:  "),
        ({"a\0": [1, 2.5, None, True, {"b": "\0"}]}, {"a ": [1, 2.5, None, True, {"b": " "}]}),
    ],
)
def test_report_is_accepted_whatever_a_scheduler_prints(
    value: Any, reported: Any, server: FakeServer, service: FakeService
) -> None:
    """Details and reason hold only what the service accepts: a refused report would leave the stop unconfirmed."""
    client = ReportClient(server.url, KEY)
    client.send(make_stop_request({}), Report("confirmed", "502 Bad Gateway\r\n", {"said": value}))
    ((_, report),) = service.reports
    accepted = ReportIn.model_validate(load(json.dumps(report).encode()))
    assert (accepted.reason, accepted.details) == ("502 Bad Gateway \n", {"said": reported})
