"""Many stops at once while calls fail at random: each job ends once, after its checkpoint, and is reported.

Every third job is parked instead, and every sixth is resumed at the end.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from evalstop_client.errors import SchedulerUnavailable
from evalstop_client.receivers.stop.execution import ReceiverContext, ReportClient
from evalstop_client.receivers.stop.job_control import Gone, Job, JobControl, Parked, Present, StopRequest
from evalstop_client.receivers.stop.journal import Journal
from evalstop_client.receivers.stop.state_machine import Phase, StopTimeouts
from evalstop_client.receivers.stop.webhooks import Receiver

from tests.clients.fake_service import KEY, Answer, FakeServer, FakeService
from tests.clients.webhooks import SECRET, make_event, make_stop_event, sign_event

STOPS, FOREIGN_STOPS, STARTS, SEED = 60, 12, 4, 20260101
FAILURE_SHARE = 0.15
BOUNDS = StopTimeouts(checkpoint_seconds=0.5, cancel_seconds=0.5, give_up_seconds=60, poll_seconds=0.1)


@dataclass
class FakeJob:
    """A job. `ignores_sigterm`: it ends only when it is killed. `ends_on_save`: it ends when it is asked to save.

    `window_begins_at`: when it was asked to save or, if the scheduler failed to ask, when it was found.
    """

    ignores_sigterm: bool
    ends_on_save: bool
    found_at: float | None = None
    window_begins_at: float | None = None
    ends_at: float | None = None
    ended_before_checkpoint: bool = False
    ends: int = 0
    resumed: bool = False


@dataclass
class FakeCluster(JobControl):
    """A scheduler of many jobs whose calls fail at random, before or after they take effect."""

    chance: random.Random
    jobs: dict[str, FakeJob] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    name: str = "fake cluster"
    part: str | None = None

    def find_job(self, request: StopRequest) -> Job | None:
        with self.lock:
            self._fail_at_random()
            name = request.labels.get("job_id", "")
            if name not in self.jobs:
                return None
            self.jobs[name].found_at = self.jobs[name].found_at or time.time()
            return Job(name)

    def request_checkpoint(self, job: Job, request: StopRequest) -> bool:
        try:
            with self._change(job) as fake_job:
                fake_job.window_begins_at = fake_job.window_begins_at or time.time()
                if fake_job.ends_on_save:
                    self._end(fake_job)
        except SchedulerUnavailable:
            self.jobs[job.id].window_begins_at = self.jobs[job.id].found_at
            raise
        return True

    def cancel_job(self, job: Job, request: StopRequest) -> None:
        with self._change(job) as fake_job:
            self._check_window(fake_job)
            if not fake_job.ignores_sigterm:
                self._end(fake_job)

    def kill_job(self, job: Job) -> None:
        with self._change(job) as fake_job:
            self._end(fake_job)

    def check_job(self, job: Job) -> Present | Gone:
        with self.lock:
            self._fail_at_random()
            ends_at = self.jobs[job.id].ends_at
            return Gone("ENDED") if ends_at is not None and time.time() >= ends_at else Present("RUNNING")

    def park_job(self, job: Job, request: StopRequest) -> None:
        with self._change(job) as fake_job:
            self._check_window(fake_job)
            self._end(fake_job)

    def check_parked(self, job: Job) -> Present | Parked | Gone:
        state = self.check_job(job)
        return Parked("HELD") if isinstance(state, Gone) else state

    def resume_job(self, job: Job) -> None:
        with self._change(job) as fake_job:
            fake_job.resumed = True

    @contextmanager
    def _change(self, job: Job) -> Iterator[FakeJob]:
        """Change a job under the lock; the call may fail before the change or, worse, after it."""
        with self.lock:
            self._fail_at_random()
            yield self.jobs[job.id]
            self._fail_at_random()

    def _check_window(self, fake_job: FakeJob) -> None:
        begins_at = fake_job.window_begins_at
        fake_job.ended_before_checkpoint |= begins_at is None or time.time() - begins_at < BOUNDS.checkpoint_seconds

    def _end(self, fake_job: FakeJob) -> None:
        if fake_job.ends_at is None:
            fake_job.ends_at = time.time() + self.chance.random() * 0.3
            fake_job.ends += 1

    def _fail_at_random(self) -> None:
        if self.chance.random() < FAILURE_SHARE:
            raise SchedulerUnavailable("it is busy")


@pytest.mark.slow
def test_every_job_ends_once_and_is_reported(tmp_path: Path, server: FakeServer, service: FakeService) -> None:
    """Scheduler and service fail at random, events repeat and arrive out of order, and the receiver restarts."""
    chance = random.Random(SEED)
    cluster = FakeCluster(chance)
    cluster.jobs = {str(number): FakeJob(chance.random() < 0.1, chance.random() < 0.2) for number in range(STOPS)}
    events = [
        (make_stop_event({"job_id": str(number)}, f"decision-{number}"), f"msg-{number}") for number in range(STOPS)
    ]
    for number in range(0, STOPS, 3):
        cluster.jobs[str(number)] = FakeJob(ignores_sigterm=False, ends_on_save=False)
        events[number][0]["type"] = "run.park_requested"
    events += [
        (make_stop_event({"job_id": f"elsewhere-{number}"}, f"other-{number}"), f"o-{number}")
        for number in range(FOREIGN_STOPS)
    ]
    deliveries = [sign_event(*event) for event in events for _ in range(chance.choice((1, 1, 2, 3)))]
    chance.shuffle(deliveries)

    def fail_at_random(path: str, body: Any) -> Answer | None:
        return None if chance.random() >= FAILURE_SHARE else Answer(chance.choice((500, 503)), {})

    service.intercept = fail_at_random
    share = len(deliveries) // STARTS
    for start in range(STARTS):
        journal = Journal(tmp_path)
        context = ReceiverContext(cluster, journal, ReportClient(server.url, KEY), BOUNDS)
        receiver = Receiver(context, lambda: [SECRET])
        receiver.start()
        is_last = start == STARTS - 1
        for headers, body in deliveries[start * share : None if is_last else (start + 1) * share]:
            assert receiver.receive(headers, body, time.time()).status in (200, 202)
        if is_last:
            assert receiver.wait_idle(180)
        assert receiver.shut_down(60)
        if is_last:
            assert journal.list_unfinished() == []
            entries = [journal.find_entry(f"decision-{number}") for number in range(STOPS)]
            assert all(
                entry is not None and entry.stop.phase is Phase.DONE and entry.stop.report_answered for entry in entries
            )
            for number in range(0, STOPS, 6):
                event = make_event("run.resume_requested", {}, f"decision-{number}")
                while receiver.receive(*sign_event(event, f"back-{number}"), time.time()).status == 503:
                    pass  # the service sends it again
        journal.close()

    assert all(fake_job.ends == 1 and not fake_job.ended_before_checkpoint for fake_job in cluster.jobs.values())
    reported = Counter((decision, report["state"]) for decision, report in service.reports)
    assert {decision for decision, _ in reported} == {f"decision-{number}" for number in range(STOPS)}
    parked = {f"decision-{number}" for number in range(0, STOPS, 3)}
    assert all(state == ("parked" if decision in parked else "confirmed") for decision, state in reported)
    resumed = [number for number, fake_job in cluster.jobs.items() if fake_job.resumed]
    assert resumed == [str(number) for number in range(0, STOPS, 6)]
    assert sum(reported.values()) <= STOPS + STARTS * 5  # only a stop in progress at a restart is reported twice
