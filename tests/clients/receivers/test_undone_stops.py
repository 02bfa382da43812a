"""The receiver over real sockets: stops that a person takes back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from evalstop_client.receivers import Gone, Job, Present

from tests.clients.fake_service import Answer, FakeService
from tests.clients.programs import wait_until
from tests.clients.receivers.fake_scheduler import FakeScheduler
from tests.clients.receivers.listening_receiver import SHORT_TIMEOUTS, ListeningReceiver
from tests.clients.webhooks import make_event, make_stop_event, post_event

RESUME = make_event("run.resume_requested", {})


def test_resume_request_resumes_the_stopped_job(listener: ListeningReceiver) -> None:
    """`run.resume_requested` resumes the job of a finished stop once."""
    post_event(listener.url, make_stop_event({}))
    assert listener.receiver.wait_idle(20)
    assert post_event(listener.url, RESUME).json() == {"undone": "decision-1"}
    assert post_event(listener.url, RESUME).json() == {"repeat": "decision-1"}
    assert listener.scheduler.calls == ["cancel", "resume"]


def test_stop_that_is_taken_back_before_the_cancel_is_dropped(
    listener: ListeningReceiver, service: FakeService
) -> None:
    """A resume request drops a stop whose job was not cancelled yet: the job runs on, and nothing is reported."""
    listener.scheduler.may_answer.clear()
    post_event(listener.url, make_stop_event({}))
    wait_until(lambda: listener.scheduler.requests)
    assert post_event(listener.url, RESUME, webhook_id="msg_2").status_code == 409
    listener.scheduler.may_answer.set()
    assert listener.receiver.wait_idle(20)
    assert post_event(listener.url, RESUME, webhook_id="msg_2").json() == {"repeat": "decision-1"}
    assert post_event(listener.url, make_stop_event({}), webhook_id="msg_3").json() == {"repeat": "decision-1"}
    assert (listener.scheduler.calls, service.reports) == ([], [])


def test_job_of_a_stop_that_is_taken_back_after_the_cancel_is_not_killed(
    listener: ListeningReceiver, service: FakeService
) -> None:
    """The job has its time to end; then the request to resume it is accepted, and later requests no longer wait."""
    listener.scheduler.ends_on = None
    timeouts = replace(SHORT_TIMEOUTS, cancel_seconds=1.0, give_up_seconds=20)
    listener.receiver.context = replace(listener.receiver.context, timeouts=timeouts)
    post_event(listener.url, make_stop_event({}))
    wait_until(lambda: listener.scheduler.calls)
    assert post_event(listener.url, RESUME, webhook_id="msg_2").status_code == 409
    assert listener.receiver.wait_idle(20)
    assert post_event(listener.url, make_stop_event({}), webhook_id="msg_3").json() == {"repeat": "decision-1"}
    assert post_event(listener.url, RESUME, webhook_id="msg_2").json() == {"undone": "decision-1"}
    assert (listener.scheduler.calls, service.reports) == (["cancel", "resume"], [])


@dataclass
class SlowScheduler(FakeScheduler):
    """Checks a job so slowly that `act` happens during each check after the cancel."""

    act: Callable[[], object] = list

    def check_job(self, job: Job) -> Present | Gone:
        if self.calls:
            self.act()
        return super().check_job(job)


def test_job_of_a_stop_that_is_taken_back_during_its_last_check_is_not_killed(
    listener: ListeningReceiver, service: FakeService
) -> None:
    """Once the time of the cancel is over, a resume request that arrives during a check still prevents the kill."""
    scheduler = SlowScheduler(ends_on=None, act=lambda: post_event(listener.url, RESUME, webhook_id="msg_2"))
    timeouts = replace(SHORT_TIMEOUTS, cancel_seconds=0, give_up_seconds=20)
    listener.receiver.context = replace(listener.receiver.context, job_control=scheduler, timeouts=timeouts)
    post_event(listener.url, make_stop_event({}))
    assert listener.receiver.wait_idle(20)
    assert (scheduler.calls, service.reports) == (["cancel"], [])


def test_report_of_a_stop_that_is_taken_back_is_not_retried(listener: ListeningReceiver, service: FakeService) -> None:
    """A report that the service does not accept delays the return of the job no longer."""
    service.intercept = lambda path, _: Answer(503, {}) if path.endswith("/report") else None
    post_event(listener.url, make_stop_event({}))
    wait_until(lambda: [path for _, path in service.requests if path.endswith("/report")])
    assert post_event(listener.url, RESUME, webhook_id="msg_2").status_code == 409
    assert listener.receiver.wait_idle(10)
    assert post_event(listener.url, RESUME, webhook_id="msg_2").json() == {"undone": "decision-1"}


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
    assert post_event(listener.url, RESUME).json() == {"unknown": "decision-1"}
    assert post_event(listener.url, make_stop_event({}), webhook_id="msg_2").json() == {"repeat": "decision-1"}
    assert listener.scheduler.calls == []
