"""The receiver over real sockets: what it does once, reports, retries and never waits for."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import httpx
import pytest
from evalstop_client.receivers import Gone, Job, Parked, Present, Receiver
from evalstop_client.receivers.stop.execution import ReceiverContext
from evalstop_client.receivers.stop.journal import Journal
from evalstop_client.receivers.stop.metrics import Metrics
from evalstop_client.receivers.stop.report import ReportClient
from evalstop_client.signature import sign

from tests.clients.fake_service import KEY, PROBLEM, Answer, FakeServer, FakeService
from tests.clients.programs import wait_until
from tests.clients.receivers.fake_scheduler import UNAVAILABLE, FakeScheduler
from tests.clients.receivers.listening_receiver import SHORT_TIMEOUTS, ListeningReceiver
from tests.clients.webhooks import SECRET, make_stop_event, post_event


def test_stop_is_accepted_then_reported(listener: ListeningReceiver, service: FakeService) -> None:
    """The webhook is answered before the job is found; the report follows when the job has ended."""
    listener.scheduler.may_answer.clear()
    assert post_event(listener.url, make_stop_event({"a": "b"})).status_code == 202
    assert service.reports == []
    listener.scheduler.may_answer.set()
    ((decision_id, report),) = wait_until(lambda: service.reports)
    assert decision_id == "decision-1"
    assert (report["state"], report["actor"]) == ("confirmed", "fake scheduler")
    assert report["reason"] == "the job ended after it was cancelled"
    assert report["details"].items() >= {"job": "7", "user": "ann", "state": "ENDED", "exit_status": -15}.items()
    assert listener.scheduler.calls == ["cancel"]
    (request,) = listener.scheduler.requests
    assert (request.run_name, request.labels, request.reason) == ("a run", {"a": "b"}, "3 declines in a row")


def test_stop_is_acknowledged_once_the_job_is_found(listener: ListeningReceiver, service: FakeService) -> None:
    """Once the job is found the service is told how many seconds the job has to save."""
    post_event(listener.url, make_stop_event({"a": "b"}))
    ((decision_id, report),) = wait_until(lambda: service.acknowledgements)
    assert (decision_id, report["actor"]) == ("decision-1", "fake scheduler")
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


class RepeatingMetrics(Metrics):
    """Calls `repeat` once, when a stop is counted as finished."""

    def __init__(self) -> None:
        super().__init__()
        self.repeat: Callable[[], object] | None = None

    def add(self, name: str, label: str = "", amount: float = 1) -> None:
        super().add(name, label, amount)
        if name == "stops_total" and self.repeat is not None:
            repeat, self.repeat = self.repeat, None
            repeat()


def test_stop_that_starts_again_as_the_earlier_one_ends_is_in_progress(listener: ListeningReceiver) -> None:
    """A failed stop that is requested again just as it ends is waited for, like any other."""
    metrics = RepeatingMetrics()
    receiver = Receiver(replace(listener.receiver.context, metrics=metrics), lambda: [SECRET])
    body = json.dumps(make_stop_event({})).encode()
    headers = sign(SECRET, "msg_1", int(time.time()), body)

    def request_again() -> None:
        listener.scheduler.may_answer.clear()
        assert receiver.receive(headers, body, time.time()).status == 202

    metrics.repeat = request_again
    listener.scheduler.refusal = "not on the allow-list"
    receiver.receive(headers, body, time.time())
    wait_until(lambda: len(listener.scheduler.requests) == 2 and "stops_under_way 1\n" in metrics.text())
    assert not receiver.wait_idle(0)
    listener.scheduler.may_answer.set()
    assert receiver.wait_idle(20)


def test_job_of_another_receiver_is_ignored(listener: ListeningReceiver, service: FakeService) -> None:
    """A stop for another receiver's job is neither carried out nor reported."""
    listener.scheduler.is_mine = False
    assert post_event(listener.url, make_stop_event({})).status_code == 202
    wait_until(lambda: listener.scheduler.requests)
    assert listener.receiver.wait_idle(20)
    assert not listener.receiver.wait_until_stopped(0)
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


def test_decision_is_obeyed_once_across_a_restart(
    listener: ListeningReceiver, server: FakeServer, service: FakeService
) -> None:
    """A restarted receiver continues the stop and repeats no call to the scheduler."""
    listener.scheduler.ends_on = None
    post_event(listener.url, make_stop_event({}))
    wait_until(lambda: listener.scheduler.calls)
    assert listener.receiver.shut_down(20)
    assert post_event(listener.url, make_stop_event({}, "decision-2")).status_code == 503
    listener.journal.close()
    folder = listener.journal.folder
    assert folder is not None
    journal = Journal(folder)
    context = ReceiverContext(
        listener.scheduler, journal, lambda: ReportClient(server.url, KEY, "next"), SHORT_TIMEOUTS, Metrics()
    )
    restarted = Receiver(context, lambda: [SECRET])
    listener.scheduler.gone = True
    restarted.start()
    ((_, report),) = wait_until(lambda: service.reports)
    assert (report["state"], report["actor"]) == ("confirmed", "next")
    assert restarted.wait_idle(20)
    assert listener.scheduler.calls == ["cancel"]
    assert len(listener.scheduler.requests) == 1
    journal.close()


def test_escalation_kills_the_job_at_once(listener: ListeningReceiver, service: FakeService) -> None:
    """`run.stop_escalated` during a stop kills the job before the rest of its grace period."""
    listener.scheduler.ends_on = "kill"
    long_timeouts = replace(SHORT_TIMEOUTS, cancel_seconds=1_000, give_up_seconds=2_000)
    listener.receiver.context = replace(listener.receiver.context, timeouts=long_timeouts)
    post_event(listener.url, make_stop_event({}))
    wait_until(lambda: listener.scheduler.calls)
    event = {**make_stop_event({}), "type": "run.stop_escalated"}
    assert post_event(listener.url, event, webhook_id="msg_2").json() == {"escalated": "decision-1"}
    ((_, report),) = wait_until(lambda: service.reports)
    assert report["reason"] == "the job ended after it was forced to"


def test_resume_request_resumes_the_stopped_job(listener: ListeningReceiver) -> None:
    """`run.resume_requested` resumes the job of a finished stop once."""
    event = {**make_stop_event({}), "type": "run.resume_requested"}
    post_event(listener.url, make_stop_event({}))
    assert listener.receiver.wait_idle(20)
    assert post_event(listener.url, event).json() == {"undone": "decision-1"}
    assert post_event(listener.url, event).json() == {"repeat": "decision-1"}
    assert listener.scheduler.calls == ["cancel", "resume"]


def test_stop_that_is_taken_back_before_the_cancel_is_dropped(
    listener: ListeningReceiver, service: FakeService
) -> None:
    """A resume request drops a stop whose job was not cancelled yet: the job runs on, and nothing is reported."""
    resume = {**make_stop_event({}), "type": "run.resume_requested"}
    listener.scheduler.may_answer.clear()
    post_event(listener.url, make_stop_event({}))
    wait_until(lambda: listener.scheduler.requests)
    assert post_event(listener.url, resume, webhook_id="msg_2").status_code == 409
    listener.scheduler.may_answer.set()
    assert listener.receiver.wait_idle(20)
    assert post_event(listener.url, resume, webhook_id="msg_2").json() == {"repeat": "decision-1"}
    assert post_event(listener.url, make_stop_event({}), webhook_id="msg_3").json() == {"repeat": "decision-1"}
    assert (listener.scheduler.calls, service.reports) == ([], [])


def test_job_of_a_stop_that_is_taken_back_after_the_cancel_is_not_killed(
    listener: ListeningReceiver, service: FakeService
) -> None:
    """The job has its time to end; then the request to resume it is accepted, and later requests no longer wait."""
    resume = {**make_stop_event({}), "type": "run.resume_requested"}
    listener.scheduler.ends_on = None
    timeouts = replace(SHORT_TIMEOUTS, cancel_seconds=1.0, give_up_seconds=20)
    listener.receiver.context = replace(listener.receiver.context, timeouts=timeouts)
    post_event(listener.url, make_stop_event({}))
    wait_until(lambda: listener.scheduler.calls)
    assert post_event(listener.url, resume, webhook_id="msg_2").status_code == 409
    assert listener.receiver.wait_idle(20)
    assert post_event(listener.url, make_stop_event({}), webhook_id="msg_3").json() == {"repeat": "decision-1"}
    assert post_event(listener.url, resume, webhook_id="msg_2").json() == {"undone": "decision-1"}
    assert (listener.scheduler.calls, service.reports) == (["cancel", "resume"], [])


def test_report_of_a_stop_that_is_taken_back_is_not_retried(listener: ListeningReceiver, service: FakeService) -> None:
    """A report that the service does not accept delays the return of the job no longer."""
    resume = {**make_stop_event({}), "type": "run.resume_requested"}
    service.intercept = lambda path, _: Answer(503, {}) if path.endswith("/report") else None
    post_event(listener.url, make_stop_event({}))
    wait_until(lambda: [path for _, path in service.requests if path.endswith("/report")])
    assert post_event(listener.url, resume, webhook_id="msg_2").status_code == 409
    assert listener.receiver.wait_idle(10)
    assert post_event(listener.url, resume, webhook_id="msg_2").json() == {"undone": "decision-1"}


def test_stop_that_the_service_says_is_undone_is_dropped(listener: ListeningReceiver, service: FakeService) -> None:
    """The answer to the acknowledgement says so before the request to resume the job has arrived."""
    service.decision_state = "undone"
    timeouts = replace(SHORT_TIMEOUTS, checkpoint_seconds=20.0)
    listener.receiver.context = replace(listener.receiver.context, timeouts=timeouts)
    post_event(listener.url, make_stop_event({}))
    wait_until(lambda: service.acknowledgements)
    assert listener.receiver.wait_idle(10)
    assert (listener.scheduler.calls, service.reports) == (["request_checkpoint"], [])


def test_stop_that_arrives_after_it_was_taken_back_is_ignored(listener: ListeningReceiver) -> None:
    """A stop request that the resume request has overtaken is not carried out."""
    resume = {**make_stop_event({}), "type": "run.resume_requested"}
    assert post_event(listener.url, resume).json() == {"unknown": "decision-1"}
    assert post_event(listener.url, make_stop_event({}), webhook_id="msg_2").json() == {"repeat": "decision-1"}
    assert listener.scheduler.calls == []


def test_job_is_parked_and_resumed(listener: ListeningReceiver, service: FakeService) -> None:
    """A parked job is reported as parked, is not parked twice, and is resumed on request."""
    listener.scheduler.ends_on = "park"
    park = {**make_stop_event({}), "type": "run.park_requested"}
    assert post_event(listener.url, park).status_code == 202
    ((_, report),) = wait_until(lambda: service.reports)
    assert (report["state"], report["details"]["parked_as"]) == ("parked", "held")
    assert listener.receiver.wait_idle(20)
    assert post_event(listener.url, park, webhook_id="msg_2").json() == {"repeat": "decision-1"}
    resume = {**make_stop_event({}), "type": "run.resume_requested"}
    assert post_event(listener.url, resume, webhook_id="msg_3").json() == {"undone": "decision-1"}
    assert listener.scheduler.calls == ["park", "resume"]


@dataclass
class CommandLikeScheduler(FakeScheduler):
    """Takes any job that is gone for parked, as a check by command does."""

    def check_parked(self, job: Job) -> Present | Parked | Gone:
        state = self.check_job(job)
        return Parked("gone") if isinstance(state, Gone) else state


def test_job_that_ends_before_it_is_parked_is_confirmed(listener: ListeningReceiver, service: FakeService) -> None:
    """A job to be parked that ends when it has saved its checkpoint is reported as ended: it cannot be resumed."""
    context = replace(
        listener.receiver.context,
        job_control=CommandLikeScheduler(ends_on="request_checkpoint"),
        timeouts=replace(SHORT_TIMEOUTS, checkpoint_seconds=20),
    )
    receiver = Receiver(context, lambda: [SECRET])
    body = json.dumps({**make_stop_event({}), "type": "run.park_requested"}).encode()
    receiver.receive(sign(SECRET, "msg_1", int(time.time()), body), body, time.time())
    assert receiver.wait_idle(20)
    assert [report["state"] for _, report in service.reports] == ["confirmed"]


def test_job_that_does_not_park_is_not_killed(listener: ListeningReceiver, service: FakeService) -> None:
    """A job that stays is reported as failed, and as parked once it has left; it is never killed."""
    listener.scheduler.ends_on = None
    assert post_event(listener.url, {**make_stop_event({}), "type": "run.park_requested"}).status_code == 202
    ((_, report),) = wait_until(lambda: service.reports)
    assert report["state"] == "failed"
    listener.scheduler.gone = True
    states = wait_until(lambda: [report["state"] for _, report in service.reports if report["state"] == "parked"])
    assert states == ["parked"]
    assert listener.scheduler.calls == ["park"]


def test_parked_job_can_be_stopped(listener: ListeningReceiver, service: FakeService) -> None:
    """A stop for the decision that parked the job is carried out, and is no repeat."""
    listener.scheduler.ends_on = "park"
    post_event(listener.url, {**make_stop_event({}), "type": "run.park_requested"})
    wait_until(lambda: service.reports)
    assert listener.receiver.wait_idle(20)
    listener.scheduler.gone, listener.scheduler.ends_on = False, "cancel"
    assert post_event(listener.url, make_stop_event({}), webhook_id="msg_2").status_code == 202
    assert listener.receiver.wait_idle(20)
    assert listener.scheduler.calls == ["park", "cancel"]
    assert service.reports[-1][1]["state"] == "confirmed"
    assert post_event(listener.url, make_stop_event({}), webhook_id="msg_3").json() == {"repeat": "decision-1"}


def test_parked_job_that_looks_gone_is_cancelled(listener: ListeningReceiver, service: FakeService) -> None:
    """A stop cancels a parked job that its scheduler reports as gone, or it could still be resumed."""
    listener.scheduler.ends_on = "park"
    post_event(listener.url, {**make_stop_event({}), "type": "run.park_requested"})
    wait_until(lambda: service.reports)
    assert listener.receiver.wait_idle(20)
    assert post_event(listener.url, make_stop_event({}), webhook_id="msg_2").status_code == 202
    assert listener.receiver.wait_idle(20)
    assert listener.scheduler.calls == ["park", "cancel"]
    assert service.reports[-1][1]["state"] == "confirmed"


def test_park_continues_after_a_restart(listener: ListeningReceiver, server: FakeServer, service: FakeService) -> None:
    """A receiver started between the park and its report sends the report, and does not stop the job."""
    listener.scheduler.ends_on = None
    post_event(listener.url, {**make_stop_event({}), "type": "run.park_requested"})
    wait_until(lambda: listener.scheduler.calls)
    assert listener.receiver.shut_down(20)
    listener.journal.close()
    assert listener.journal.folder is not None
    journal = Journal(listener.journal.folder)
    context = ReceiverContext(
        listener.scheduler, journal, lambda: ReportClient(server.url, KEY, "next"), SHORT_TIMEOUTS, Metrics()
    )
    restarted = Receiver(context, lambda: [SECRET])
    listener.scheduler.gone = True
    restarted.start()
    assert wait_until(lambda: service.reports)[-1][1]["state"] in ("failed", "parked")
    assert restarted.wait_idle(20)
    assert (service.reports[-1][1]["state"], listener.scheduler.calls) == ("parked", ["park"])
    journal.close()


def test_unwritable_journal_gets_503(listener: ListeningReceiver) -> None:
    """A stop that cannot be journaled is answered 503 and does not begin."""
    folder = listener.journal.folder
    assert folder is not None
    folder.rename(folder.with_name("elsewhere"))
    assert post_event(listener.url, make_stop_event({})).status_code == 503
    folder.with_name("elsewhere").rename(folder)
    assert post_event(listener.url, make_stop_event({})).status_code == 202


def test_metrics_count_webhooks_and_stops(listener: ListeningReceiver) -> None:
    """/metrics counts webhooks by status and stops by result."""
    post_event(listener.url, make_stop_event({}))
    wait_until(lambda: listener.scheduler.gone)
    assert listener.receiver.wait_idle(20)
    text = httpx.get(listener.url + "metrics").text
    assert 'evalstop_receiver_webhooks_total{status="202"} 1' in text
    assert 'evalstop_receiver_stops_total{result="confirmed"} 1' in text
    assert "evalstop_receiver_stops_under_way 0" in text
    assert "# TYPE evalstop_receiver_reports_total counter" in text


def test_other_event_types_are_ignored(listener: ListeningReceiver) -> None:
    """An event of another type gets 200 and is named in the answer."""
    answer = post_event(listener.url, {"type": "run.suspected", "data": {}})
    assert (answer.status_code, answer.json()) == (200, {"ignored": "run.suspected"})


def test_only_livez_can_be_read(listener: ListeningReceiver) -> None:
    """/livez is open; any other page gets 404 and any other method 501."""
    assert httpx.get(listener.url + "livez").status_code == 200
    assert httpx.get(listener.url).status_code == 404
    assert httpx.put(listener.url).status_code == 501
