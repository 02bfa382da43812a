"""The receiver over real sockets: who is let in, what is done once, what is reported, and whom it does not wait for."""

from __future__ import annotations

from dataclasses import replace

import httpx
import pytest
from evalstop_client.receivers import Receiver
from evalstop_client.receivers.stop.execution import ReceiverContext
from evalstop_client.receivers.stop.journal import Journal
from evalstop_client.receivers.stop.metrics import Metrics
from evalstop_client.receivers.stop.report import ReportClient

from tests.clients.fake_service import KEY, PROBLEM, Answer, FakeServer, FakeService
from tests.clients.programs import wait_until
from tests.clients.receivers.fake_scheduler import UNAVAILABLE
from tests.clients.receivers.listening_receiver import SHORT_TIMEOUTS, ListeningReceiver
from tests.clients.webhooks import SECRET, make_stop_event, post_event


def test_stop_is_answered_at_once_carried_out_and_reported(listener: ListeningReceiver, service: FakeService) -> None:
    """The sender does not wait for the job's end; the service hears of it when it has come."""
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


def test_stop_that_is_taken_up_is_acknowledged(listener: ListeningReceiver, service: FakeService) -> None:
    """Once its job is found the service hears that the end is under way, and how long the job has to save."""
    post_event(listener.url, make_stop_event({"a": "b"}))
    ((decision_id, report),) = wait_until(lambda: service.acknowledgements)
    assert (decision_id, report["actor"]) == ("decision-1", "fake scheduler")
    assert report["details"].items() >= {"job": "7", "user": "ann"}.items()
    assert report["expected_seconds"] == listener.receiver.context.bounds.checkpoint_seconds


def test_nothing_waits_for_the_acknowledgement(listener: ListeningReceiver, service: FakeService) -> None:
    """A service that takes its time to hear that a stop was taken up does not keep the job from its end."""
    service.accepts_acknowledgements.clear()
    post_event(listener.url, make_stop_event({}))
    ((_, report),) = wait_until(lambda: service.reports)
    assert report["state"] == "confirmed"
    assert service.acknowledgements == []
    service.accepts_acknowledgements.set()
    assert wait_until(lambda: service.acknowledgements)


def test_job_that_is_gone_is_not_acknowledged(listener: ListeningReceiver, service: FakeService) -> None:
    """Where there is nothing to begin, only the end is told."""
    listener.scheduler.gone = True
    post_event(listener.url, make_stop_event({}))
    assert wait_until(lambda: service.reports)
    assert service.acknowledgements == []


def test_report_is_repeated_until_it_is_accepted(listener: ListeningReceiver, service: FakeService) -> None:
    """A service that is away when the job ends still hears of it."""
    service.scripted_answers = [Answer(503, {}), Answer(500, {})]
    post_event(listener.url, make_stop_event({}))
    assert wait_until(lambda: service.reports)


def test_refused_report_is_not_repeated(listener: ListeningReceiver, service: FakeService) -> None:
    """A decision that the service does not know is not insisted upon."""
    service.scripted_answers = [Answer(404, {"title": "no such decision"}, {"content-type": PROBLEM})]
    post_event(listener.url, make_stop_event({}))
    wait_until(lambda: listener.scheduler.requests)
    assert listener.receiver.wait_idle(20)
    assert service.scripted_answers == []
    assert service.reports == []


def test_job_that_stays_is_reported_as_failed_and_watched_on(listener: ListeningReceiver, service: FakeService) -> None:
    """What cannot be ended is told once its time is over; should it end after all, that is told too."""
    listener.scheduler.ends_on = None
    post_event(listener.url, make_stop_event({}))
    ((_, failed),) = wait_until(lambda: service.reports)
    assert failed["state"] == "failed"
    assert "RUNNING" in failed["reason"]
    assert listener.scheduler.calls[:2] == ["cancel", "kill"]
    listener.scheduler.gone = True
    wait_until(lambda: len(service.reports) == 2)
    assert service.reports[1][1]["state"] == "confirmed"


@pytest.mark.parametrize("trouble", [UNAVAILABLE, RuntimeError("it hangs")])
def test_scheduler_that_is_away_is_waited_for(
    listener: ListeningReceiver, service: FakeService, trouble: Exception
) -> None:
    """A scheduler that does not answer, or an action that breaks, is told of and tried again until it works."""
    listener.scheduler.error = trouble
    post_event(listener.url, make_stop_event({}))
    ((_, failed),) = wait_until(lambda: service.reports)
    assert (failed["state"], listener.scheduler.calls) == ("failed", [])
    listener.scheduler.error = None
    wait_until(lambda: len(service.reports) == 2)
    assert (service.reports[1][1]["state"], listener.scheduler.calls) == ("confirmed", ["cancel"])


def test_refused_request_fails_and_may_be_made_again(listener: ListeningReceiver, service: FakeService) -> None:
    """What is outside the allow-list is told at once; the same event later, with another allow-list, is obeyed."""
    listener.scheduler.refusal = "not on the allow-list"
    post_event(listener.url, make_stop_event({}))
    ((_, report),) = wait_until(lambda: service.reports)
    assert (report["state"], report["reason"], listener.scheduler.calls) == ("failed", "not on the allow-list", [])
    assert listener.receiver.wait_idle(20)
    listener.scheduler.refusal = None
    assert post_event(listener.url, make_stop_event({})).status_code == 202
    wait_until(lambda: len(service.reports) == 2)
    assert listener.scheduler.calls == ["cancel"]


def test_job_of_another_receiver_is_none_of_ours(listener: ListeningReceiver, service: FakeService) -> None:
    """What is not ours is neither reported nor mistaken for an end of ours."""
    listener.scheduler.is_mine = False
    assert post_event(listener.url, make_stop_event({})).status_code == 202
    wait_until(lambda: listener.scheduler.requests)
    assert listener.receiver.wait_idle(20)
    assert not listener.receiver.wait_until_stopped(0)
    assert service.requests == []


def test_decision_is_obeyed_once(listener: ListeningReceiver) -> None:
    """The same decision again, under the same webhook-id or another, during the stop and after it, changes nothing."""
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
    """A receiver that was started again goes on where the one before it was, and repeats nothing."""
    listener.scheduler.ends_on = None
    post_event(listener.url, make_stop_event({}))
    wait_until(lambda: listener.scheduler.calls)
    assert listener.receiver.leave(20)
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


def test_escalation_of_a_stop_under_way_forces_it(listener: ListeningReceiver, service: FakeService) -> None:
    """When the service loses its patience, the job is not given the rest of its time."""
    listener.scheduler.ends_on = "kill"
    patient = replace(SHORT_TIMEOUTS, cancel_seconds=1_000, give_up_seconds=2_000)
    listener.receiver.context = replace(listener.receiver.context, bounds=patient)
    post_event(listener.url, make_stop_event({}))
    wait_until(lambda: listener.scheduler.calls)
    event = {**make_stop_event({}), "type": "run.stop_escalated"}
    assert post_event(listener.url, event, webhook_id="msg_2").json() == {"escalated": "decision-1"}
    ((_, report),) = wait_until(lambda: service.reports)
    assert report["reason"] == "the job ended after it was forced to"


def test_undo_goes_to_the_job_that_was_stopped(listener: ListeningReceiver) -> None:
    """A stop that is done is undone once; one that nobody knows, or that is under way, is not."""
    event = {**make_stop_event({}), "type": "run.resume_requested"}
    assert post_event(listener.url, event).json() == {"unknown": "decision-1"}
    listener.scheduler.may_answer.clear()
    post_event(listener.url, make_stop_event({}))
    assert post_event(listener.url, event).status_code == 200  # not found yet, so there is nothing to undo
    listener.scheduler.may_answer.set()
    assert listener.receiver.wait_idle(20)
    assert post_event(listener.url, event).json() == {"undone": "decision-1"}
    assert post_event(listener.url, event).json() == {"repeat": "decision-1"}
    assert listener.scheduler.calls == ["cancel", "resume"]


def test_a_job_is_parked_and_resumed(listener: ListeningReceiver, service: FakeService) -> None:
    """Set aside it is reported as parked; asked for again nothing is done; then it is brought back."""
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


def test_a_job_that_will_not_be_parked_is_not_forced(listener: ListeningReceiver, service: FakeService) -> None:
    """It is reported as failed and watched on; when it has left at last, that is reported too."""
    listener.scheduler.ends_on = None
    assert post_event(listener.url, {**make_stop_event({}), "type": "run.park_requested"}).status_code == 202
    ((_, report),) = wait_until(lambda: service.reports)
    assert report["state"] == "failed"
    listener.scheduler.gone = True
    states = wait_until(lambda: [one["state"] for _, one in service.reports if one["state"] == "parked"])
    assert states == ["parked"]
    assert listener.scheduler.calls == ["park"]


def test_a_parked_job_is_stopped_for_good(listener: ListeningReceiver, service: FakeService) -> None:
    """The same decision may ask to stop what it had parked: that is no repeat, not even after a restart."""
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


def test_a_park_survives_the_receiver(listener: ListeningReceiver, server: FakeServer, service: FakeService) -> None:
    """A receiver that is killed between the park and its report leaves it to the next one, which does not stop it."""
    listener.scheduler.ends_on = None
    post_event(listener.url, {**make_stop_event({}), "type": "run.park_requested"})
    wait_until(lambda: listener.scheduler.calls)
    assert listener.receiver.leave(20)
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


def test_what_cannot_be_remembered_is_not_begun(listener: ListeningReceiver) -> None:
    """A receiver that cannot write would obey twice after a restart: it asks the sender to come again."""
    folder = listener.journal.folder
    assert folder is not None
    folder.rename(folder.with_name("elsewhere"))
    assert post_event(listener.url, make_stop_event({})).status_code == 503
    folder.with_name("elsewhere").rename(folder)
    assert post_event(listener.url, make_stop_event({})).status_code == 202


def test_metrics_count_what_happened(listener: ListeningReceiver) -> None:
    """What was answered, what came of it and what is under way can be read by a monitoring system."""
    post_event(listener.url, make_stop_event({}))
    wait_until(lambda: listener.scheduler.gone)
    assert listener.receiver.wait_idle(20)
    text = httpx.get(listener.url + "metrics").text
    assert 'evalstop_receiver_webhooks_total{status="202"} 1' in text
    assert 'evalstop_receiver_stops_total{result="confirmed"} 1' in text
    assert "evalstop_receiver_stops_under_way 0" in text
    assert "# TYPE evalstop_receiver_reports_total counter" in text


def test_other_events_are_ignored_politely(listener: ListeningReceiver) -> None:
    """An event of another type is answered 200 and named."""
    answer = post_event(listener.url, {"type": "run.suspected", "data": {}})
    assert (answer.status_code, answer.json()) == (200, {"ignored": "run.suspected"})


def test_livez_and_nothing_else_can_be_read(listener: ListeningReceiver) -> None:
    """Anyone may ask whether it lives; any other page is not there, any other verb not known."""
    assert httpx.get(listener.url + "livez").status_code == 200
    assert httpx.get(listener.url).status_code == 404
    assert httpx.put(listener.url).status_code == 501
