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
from tests.clients.programs import eventually
from tests.clients.receivers.fake_scheduler import AWAY
from tests.clients.receivers.listening_receiver import QUICK, Setup
from tests.clients.webhooks import SECRET, send, stop_event


def test_stop_is_answered_at_once_carried_out_and_reported(setup: Setup, service: FakeService) -> None:
    """The sender does not wait for the job's end; the service hears of it when it has come."""
    setup.action.go_on.clear()
    assert send(setup.url, stop_event({"a": "b"})).status_code == 202
    assert service.reports == []
    setup.action.go_on.set()
    ((decision_id, report),) = eventually(lambda: service.reports)
    assert decision_id == "decision-1"
    assert (report["state"], report["actor"]) == ("confirmed", "fake action")
    assert report["reason"] == "the job ended after it was cancelled"
    assert report["details"].items() >= {"job": "7", "user": "ann", "state": "ENDED", "exit_status": -15}.items()
    assert setup.action.verbs == ["cancel"]
    (request,) = setup.action.asked
    assert (request.run_name, request.labels, request.reason) == ("a run", {"a": "b"}, "3 declines in a row")


def test_stop_that_is_taken_up_is_acknowledged(setup: Setup, service: FakeService) -> None:
    """Once its job is found the service hears that the end is under way, and how long the job has to save."""
    send(setup.url, stop_event({"a": "b"}))
    ((decision_id, report),) = eventually(lambda: service.acknowledged)
    assert (decision_id, report["actor"]) == ("decision-1", "fake action")
    assert report["details"].items() >= {"job": "7", "user": "ann"}.items()
    assert report["expected_seconds"] == setup.receiver.context.bounds.checkpoint_seconds


def test_nothing_waits_for_the_acknowledgement(setup: Setup, service: FakeService) -> None:
    """A service that takes its time to hear that a stop was taken up does not keep the job from its end."""
    service.hear.clear()
    send(setup.url, stop_event({}))
    ((_, report),) = eventually(lambda: service.reports)
    assert report["state"] == "confirmed"
    assert service.acknowledged == []
    service.hear.set()
    assert eventually(lambda: service.acknowledged)


def test_job_that_is_gone_is_not_acknowledged(setup: Setup, service: FakeService) -> None:
    """Where there is nothing to begin, only the end is told."""
    setup.action.gone = True
    send(setup.url, stop_event({}))
    assert eventually(lambda: service.reports)
    assert service.acknowledged == []


def test_report_is_repeated_until_it_is_accepted(setup: Setup, service: FakeService) -> None:
    """A service that is away when the job ends still hears of it."""
    service.forced = [Answer(503, {}), Answer(500, {})]
    send(setup.url, stop_event({}))
    assert eventually(lambda: service.reports)


def test_refused_report_is_not_repeated(setup: Setup, service: FakeService) -> None:
    """A decision that the service does not know is not insisted upon."""
    service.forced = [Answer(404, {"title": "no such decision"}, {"content-type": PROBLEM})]
    send(setup.url, stop_event({}))
    eventually(lambda: setup.action.asked)
    assert setup.receiver.wait_idle(20)
    assert service.forced == []
    assert service.reports == []


def test_job_that_stays_is_reported_as_failed_and_watched_on(setup: Setup, service: FakeService) -> None:
    """What cannot be ended is told once its time is over; should it end after all, that is told too."""
    setup.action.ends_on = None
    send(setup.url, stop_event({}))
    ((_, failed),) = eventually(lambda: service.reports)
    assert failed["state"] == "failed"
    assert "RUNNING" in failed["reason"]
    assert setup.action.verbs[:2] == ["cancel", "force"]
    setup.action.gone = True
    eventually(lambda: len(service.reports) == 2)
    assert service.reports[1][1]["state"] == "confirmed"


@pytest.mark.parametrize("trouble", [AWAY, RuntimeError("it hangs")])
def test_scheduler_that_is_away_is_waited_for(setup: Setup, service: FakeService, trouble: Exception) -> None:
    """A scheduler that does not answer, or an action that breaks, is told of and tried again until it works."""
    setup.action.trouble = trouble
    send(setup.url, stop_event({}))
    ((_, failed),) = eventually(lambda: service.reports)
    assert (failed["state"], setup.action.verbs) == ("failed", [])
    setup.action.trouble = None
    eventually(lambda: len(service.reports) == 2)
    assert (service.reports[1][1]["state"], setup.action.verbs) == ("confirmed", ["cancel"])


def test_refused_request_fails_and_may_be_made_again(setup: Setup, service: FakeService) -> None:
    """What is outside the allow-list is told at once; the same event later, with another allow-list, is obeyed."""
    setup.action.refusal = "not on the allow-list"
    send(setup.url, stop_event({}))
    ((_, report),) = eventually(lambda: service.reports)
    assert (report["state"], report["reason"], setup.action.verbs) == ("failed", "not on the allow-list", [])
    assert setup.receiver.wait_idle(20)
    setup.action.refusal = None
    assert send(setup.url, stop_event({})).status_code == 202
    eventually(lambda: len(service.reports) == 2)
    assert setup.action.verbs == ["cancel"]


def test_job_of_another_receiver_is_none_of_ours(setup: Setup, service: FakeService) -> None:
    """What is not ours is neither reported nor mistaken for an end of ours."""
    setup.action.is_mine = False
    assert send(setup.url, stop_event({})).status_code == 202
    eventually(lambda: setup.action.asked)
    assert setup.receiver.wait_idle(20)
    assert not setup.receiver.wait_until_stopped(0)
    assert service.requests == []


def test_decision_is_obeyed_once(setup: Setup) -> None:
    """The same decision again, under the same webhook-id or another, during the stop and after it, changes nothing."""
    setup.action.go_on.clear()
    assert send(setup.url, stop_event({})).status_code == 202
    assert send(setup.url, stop_event({})).status_code == 200
    setup.action.go_on.set()
    assert setup.receiver.wait_idle(20)
    assert send(setup.url, stop_event({})).json() == {"repeat": "decision-1"}
    assert send(setup.url, stop_event({}), webhook_id="msg_2").status_code == 200
    assert setup.receiver.wait_idle(20)
    assert setup.action.verbs == ["cancel"]


def test_decision_is_obeyed_once_across_a_restart(setup: Setup, server: FakeServer, service: FakeService) -> None:
    """A receiver that was started again goes on where the one before it was, and repeats nothing."""
    setup.action.ends_on = None
    send(setup.url, stop_event({}))
    eventually(lambda: setup.action.verbs)
    assert setup.receiver.leave(20)
    assert send(setup.url, stop_event({}, "decision-2")).status_code == 503
    setup.memory.close()
    folder = setup.memory.folder
    assert folder is not None
    memory = Journal(folder)
    around = ReceiverContext(setup.action, memory, lambda: ReportClient(server.url, KEY, "next"), QUICK, Metrics())
    following = Receiver(around, lambda: [SECRET])
    setup.action.gone = True
    following.start()
    ((_, report),) = eventually(lambda: service.reports)
    assert (report["state"], report["actor"]) == ("confirmed", "next")
    assert following.wait_idle(20)
    assert setup.action.verbs == ["cancel"]
    assert len(setup.action.asked) == 1
    memory.close()


def test_escalation_of_a_stop_under_way_forces_it(setup: Setup, service: FakeService) -> None:
    """When the service loses its patience, the job is not given the rest of its time."""
    setup.action.ends_on = "force"
    patient = replace(QUICK, cancel_seconds=1_000, give_up_seconds=2_000)
    setup.receiver.context = replace(setup.receiver.context, bounds=patient)
    send(setup.url, stop_event({}))
    eventually(lambda: setup.action.verbs)
    event = {**stop_event({}), "type": "run.stop_escalated"}
    assert send(setup.url, event, webhook_id="msg_2").json() == {"escalated": "decision-1"}
    ((_, report),) = eventually(lambda: service.reports)
    assert report["reason"] == "the job ended after it was forced to"


def test_undo_goes_to_the_job_that_was_stopped(setup: Setup) -> None:
    """A stop that is done is undone once; one that nobody knows, or that is under way, is not."""
    event = {**stop_event({}), "type": "run.resume_requested"}
    assert send(setup.url, event).json() == {"unknown": "decision-1"}
    setup.action.go_on.clear()
    send(setup.url, stop_event({}))
    assert send(setup.url, event).status_code == 200  # not found yet, so there is nothing to undo
    setup.action.go_on.set()
    assert setup.receiver.wait_idle(20)
    assert send(setup.url, event).json() == {"undone": "decision-1"}
    assert send(setup.url, event).json() == {"repeat": "decision-1"}
    assert setup.action.verbs == ["cancel", "undo"]


def test_a_job_is_parked_and_resumed(setup: Setup, service: FakeService) -> None:
    """Set aside it is reported as parked; asked for again nothing is done; then it is brought back."""
    setup.action.ends_on = "park"
    park = {**stop_event({}), "type": "run.park_requested"}
    assert send(setup.url, park).status_code == 202
    ((_, report),) = eventually(lambda: service.reports)
    assert (report["state"], report["details"]["parked_as"]) == ("parked", "held")
    assert setup.receiver.wait_idle(20)
    assert send(setup.url, park, webhook_id="msg_2").json() == {"repeat": "decision-1"}
    resume = {**stop_event({}), "type": "run.resume_requested"}
    assert send(setup.url, resume, webhook_id="msg_3").json() == {"undone": "decision-1"}
    assert setup.action.verbs == ["park", "undo"]


def test_a_job_that_will_not_be_parked_is_not_forced(setup: Setup, service: FakeService) -> None:
    """It is reported as failed and watched on; when it has left at last, that is reported too."""
    setup.action.ends_on = None
    assert send(setup.url, {**stop_event({}), "type": "run.park_requested"}).status_code == 202
    ((_, report),) = eventually(lambda: service.reports)
    assert report["state"] == "failed"
    setup.action.gone = True
    states = eventually(lambda: [one["state"] for _, one in service.reports if one["state"] == "parked"])
    assert states == ["parked"]
    assert setup.action.verbs == ["park"]


def test_a_parked_job_is_stopped_for_good(setup: Setup, service: FakeService) -> None:
    """The same decision may ask to stop what it had parked: that is no repeat, not even after a restart."""
    setup.action.ends_on = "park"
    send(setup.url, {**stop_event({}), "type": "run.park_requested"})
    eventually(lambda: service.reports)
    assert setup.receiver.wait_idle(20)
    setup.action.gone, setup.action.ends_on = False, "cancel"
    assert send(setup.url, stop_event({}), webhook_id="msg_2").status_code == 202
    assert setup.receiver.wait_idle(20)
    assert setup.action.verbs == ["park", "cancel"]
    assert service.reports[-1][1]["state"] == "confirmed"
    assert send(setup.url, stop_event({}), webhook_id="msg_3").json() == {"repeat": "decision-1"}


def test_a_park_survives_the_receiver(setup: Setup, server: FakeServer, service: FakeService) -> None:
    """A receiver that is killed between the park and its report leaves it to the next one, which does not stop it."""
    setup.action.ends_on = None
    send(setup.url, {**stop_event({}), "type": "run.park_requested"})
    eventually(lambda: setup.action.verbs)
    assert setup.receiver.leave(20)
    setup.memory.close()
    assert setup.memory.folder is not None
    memory = Journal(setup.memory.folder)
    around = ReceiverContext(setup.action, memory, lambda: ReportClient(server.url, KEY, "next"), QUICK, Metrics())
    following = Receiver(around, lambda: [SECRET])
    setup.action.gone = True
    following.start()
    assert eventually(lambda: service.reports)[-1][1]["state"] in ("failed", "parked")
    assert following.wait_idle(20)
    assert (service.reports[-1][1]["state"], setup.action.verbs) == ("parked", ["park"])
    memory.close()


def test_what_cannot_be_remembered_is_not_begun(setup: Setup) -> None:
    """A receiver that cannot write would obey twice after a restart: it asks the sender to come again."""
    folder = setup.memory.folder
    assert folder is not None
    folder.rename(folder.with_name("elsewhere"))
    assert send(setup.url, stop_event({})).status_code == 503
    folder.with_name("elsewhere").rename(folder)
    assert send(setup.url, stop_event({})).status_code == 202


def test_metrics_count_what_happened(setup: Setup) -> None:
    """What was answered, what came of it and what is under way can be read by a monitoring system."""
    send(setup.url, stop_event({}))
    eventually(lambda: setup.action.gone)
    assert setup.receiver.wait_idle(20)
    text = httpx.get(setup.url + "metrics").text
    assert 'evalstop_receiver_webhooks_total{status="202"} 1' in text
    assert 'evalstop_receiver_stops_total{result="confirmed"} 1' in text
    assert "evalstop_receiver_stops_under_way 0" in text
    assert "# TYPE evalstop_receiver_reports_total counter" in text


def test_other_events_are_ignored_politely(setup: Setup) -> None:
    """An event of another type is answered 200 and named."""
    answer = send(setup.url, {"type": "run.suspected", "data": {}})
    assert (answer.status_code, answer.json()) == (200, {"ignored": "run.suspected"})


def test_livez_and_nothing_else_can_be_read(setup: Setup) -> None:
    """Anyone may ask whether it lives; any other page is not there, any other verb not known."""
    assert httpx.get(setup.url + "livez").status_code == 200
    assert httpx.get(setup.url).status_code == 404
    assert httpx.put(setup.url).status_code == 501
