"""The receiver over real sockets: jobs that are parked instead of cancelled, and stops that a person takes back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from evalstop_client.receivers.stop.job_control import Gone, Job, Parked, Present
from evalstop_client.receivers.stop.receiver import IdleReturns

from tests.clients.fake_service import Answer, FakeService
from tests.clients.programs import wait_until
from tests.clients.receivers.fake_scheduler import FakeScheduler
from tests.clients.receivers.listening_receiver import SHORT_TIMEOUTS, ListeningReceiver
from tests.clients.webhooks import make_event, make_stop_event, post_event

PARK = make_event("run.park_requested", {})


def test_job_is_parked_and_resumed(listener: ListeningReceiver, service: FakeService) -> None:
    """A parked job is reported as parked, is not parked twice, and is resumed on request."""
    listener.scheduler.ends_on = "park"
    assert post_event(listener.url, PARK).status_code == 202
    ((_, report),) = wait_until(lambda: service.reports)
    assert (report["state"], report["details"]["parked_as"]) == ("parked", "held")
    assert listener.receiver.wait_idle(20)
    assert post_event(listener.url, PARK, webhook_id="msg_2").json() == {"repeat": "decision-1"}
    resume = make_event("run.resume_requested", {})
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
    listener.receiver.context = replace(
        listener.receiver.context,
        job_control=CommandLikeScheduler(ends_on="request_checkpoint"),
        timeouts=replace(SHORT_TIMEOUTS, checkpoint_seconds=20),
    )
    post_event(listener.url, PARK)
    assert listener.receiver.wait_idle(20)
    assert [report["state"] for _, report in service.reports] == ["confirmed"]


def test_job_that_does_not_park_is_not_killed(listener: ListeningReceiver, service: FakeService) -> None:
    """A job that stays is reported as failed, and as parked once it has left; it is never killed."""
    listener.scheduler.ends_on = None
    assert post_event(listener.url, PARK).status_code == 202
    ((_, report),) = wait_until(lambda: service.reports)
    assert report["state"] == "failed"
    listener.scheduler.gone = True
    states = wait_until(lambda: [report["state"] for _, report in service.reports if report["state"] == "parked"])
    assert states == ["parked"]
    assert listener.scheduler.calls == ["park"]


def test_parked_job_can_be_stopped(listener: ListeningReceiver, service: FakeService) -> None:
    """A stop for the decision that parked the job is carried out, and is no repeat."""
    listener.scheduler.ends_on = "park"
    post_event(listener.url, PARK)
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
    post_event(listener.url, PARK)
    wait_until(lambda: service.reports)
    assert listener.receiver.wait_idle(20)
    assert post_event(listener.url, make_stop_event({}), webhook_id="msg_2").status_code == 202
    assert listener.receiver.wait_idle(20)
    assert listener.scheduler.calls == ["park", "cancel"]
    assert service.reports[-1][1]["state"] == "confirmed"


def test_park_continues_after_a_restart(listener: ListeningReceiver, service: FakeService) -> None:
    """A receiver started between the park and its report sends the report, and does not stop the job."""
    listener.scheduler.ends_on = None
    post_event(listener.url, PARK)
    wait_until(lambda: listener.scheduler.calls)
    restarted = listener.make_next_receiver()
    listener.scheduler.gone = True
    restarted.start()
    assert wait_until(lambda: service.reports)[-1][1]["state"] in ("failed", "parked")
    assert restarted.wait_idle(20)
    assert (service.reports[-1][1]["state"], listener.scheduler.calls) == ("parked", ["park"])


def test_parked_job_runs_while_nobody_waits(listener: ListeningReceiver, service: FakeService) -> None:
    """It is let run, set aside once others wait, and stays so after as many times as allowed, also after a restart."""
    park(listener, service)
    look(listener, others_wait=True)
    assert listener.scheduler.calls == ["park"]
    look(listener, others_wait=False)
    listener.scheduler.gone = False  # it runs again
    look(listener, others_wait=False)
    assert listener.scheduler.calls == ["park", "resume"]
    look(listener, others_wait=True)
    listener.receiver = listener.make_next_receiver()
    look(listener, others_wait=False)
    assert listener.scheduler.calls == ["park", "resume", "park"]
    assert [report["state"] for _, report in service.reports] == ["parked"]


def test_job_that_a_person_resumed_is_not_set_aside(listener: ListeningReceiver, service: FakeService) -> None:
    """Once the decision is taken back the job is like any other, whoever waits."""
    park(listener, service)
    look(listener, others_wait=False)
    listener.scheduler.gone = False
    post_event(listener.url, make_event("run.resume_requested", {}), webhook_id="msg_2")
    look(listener, others_wait=True)
    assert listener.scheduler.calls == ["park", "resume", "resume"]


def park(listener: ListeningReceiver, service: FakeService) -> None:
    """Have the job parked, and that reported."""
    listener.scheduler.ends_on = "park"
    post_event(listener.url, PARK)
    wait_until(lambda: service.reports)
    assert listener.receiver.wait_idle(20)


def look(listener: ListeningReceiver, others_wait: bool) -> None:
    """One look at the parked jobs, each of which may be set aside once."""
    listener.scheduler.has_others_waiting = others_wait
    IdleReturns(listener.receiver, most=1).look()


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
