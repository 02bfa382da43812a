"""Many stops at one time while everything fails now and then: each job ends once, after its checkpoint, and is told.

Every third job is parked instead, and every sixth resumed in the end."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from evalstop_client.errors import SchedulerUnavailable
from evalstop_client.receivers import ForeignJob, Gone, Job, Parked, Present, Receiver, StopRequest
from evalstop_client.receivers.stop.execution import ReceiverContext
from evalstop_client.receivers.stop.journal import Journal
from evalstop_client.receivers.stop.metrics import Metrics
from evalstop_client.receivers.stop.report import ReportClient
from evalstop_client.receivers.stop.state_machine import Phase, StopTimeouts
from evalstop_client.signature import sign

from tests.clients.fake_service import KEY, Answer, FakeServer, FakeService
from tests.clients.webhooks import SECRET, make_stop_event

STOPS, OTHERS, RESTARTS, SEED = 150, 30, 4, 20260101
TROUBLE = 0.15
BOUNDS = StopTimeouts(checkpoint_seconds=0.5, cancel_seconds=0.5, give_up_seconds=60, poll_seconds=0.1)


@dataclass
class FakeJob:
    """A job; `deaf` ends only when forced, `quits` when it is asked to save."""

    deaf: bool
    quits: bool
    asked_at: float | None = None
    ends_at: float | None = None
    cancelled_early: bool = False
    ends: int = 0
    resumed: int = 0


@dataclass
class FakeCluster:
    """A scheduler of many jobs that fails now and then, before or after it has done what it was asked."""

    chance: random.Random
    jobs: dict[str, FakeJob] = field(default_factory=dict)
    verbs: Counter[str] = field(default_factory=Counter)
    changing: threading.Lock = field(default_factory=threading.Lock)
    name: str = "fake cluster"

    def find_job(self, request: StopRequest) -> Job | ForeignJob:
        with self.changing:
            self._fail()
            name = request.labels.get("job_id", "")
            return Job(name) if name in self.jobs else ForeignJob()

    def request_checkpoint(self, job: Job, request: StopRequest) -> bool:
        with self._doing("ask", job) as one:
            one.asked_at = one.asked_at or time.time()
            if one.quits:
                self._end(one)
        return True

    def cancel_job(self, job: Job, request: StopRequest) -> None:
        with self._doing("cancel", job) as one:
            one.cancelled_early |= one.asked_at is None or time.time() - one.asked_at < BOUNDS.checkpoint_seconds
            if not one.deaf:
                self._end(one)

    def kill_job(self, job: Job) -> None:
        with self._doing("force", job) as one:
            self._end(one)

    def check_job(self, job: Job) -> Present | Gone:
        with self.changing:
            self._fail()
            ends_at = self.jobs[job.id].ends_at
            return Gone("ENDED") if ends_at is not None and time.time() >= ends_at else Present("RUNNING")

    def park_job(self, job: Job, request: StopRequest) -> None:
        with self._doing("park", job) as one:
            one.cancelled_early |= one.asked_at is None or time.time() - one.asked_at < BOUNDS.checkpoint_seconds
            self._end(one)

    def check_parked(self, job: Job) -> Present | Parked | Gone:
        seen = self.check_job(job)
        return Parked("HELD") if isinstance(seen, Gone) else seen

    def resume_job(self, job: Job) -> None:
        with self._doing("resume", job) as one:
            one.resumed = 1

    def _doing(self, verb: str, job: Job) -> _Doing:
        return _Doing(self, verb, self.jobs[job.id])

    def _end(self, one: FakeJob) -> None:
        if one.ends_at is None:
            one.ends_at = time.time() + self.chance.random() * 0.3
            one.ends += 1

    def _fail(self) -> None:
        if self.chance.random() < TROUBLE:
            raise SchedulerUnavailable("it is busy")


@dataclass
class _Doing:
    """A verb under the lock, which may fail before it is done or, worse, after."""

    cluster: FakeCluster
    verb: str
    job: FakeJob

    def __enter__(self) -> FakeJob:
        self.cluster.changing.acquire()
        try:
            self.cluster._fail()
        except SchedulerUnavailable:
            self.cluster.changing.release()
            raise
        self.cluster.verbs[self.verb] += 1
        return self.job

    def __exit__(self, *error: object) -> None:
        try:
            self.cluster._fail()
        finally:
            self.cluster.changing.release()


def signed(event: Any, name: str) -> tuple[dict[str, str], bytes]:
    body = json.dumps(event).encode()
    return sign(SECRET, name, int(time.time()), body), body


@pytest.mark.timeout(240)
def test_every_job_is_ended_once_and_reported_whatever_fails(
    tmp_path: Path, server: FakeServer, service: FakeService
) -> None:
    """Scheduler and service fail, events come twice and out of order, the receiver is started again and again."""
    chance = random.Random(SEED)
    cluster = FakeCluster(chance)
    cluster.jobs = {str(number): FakeJob(chance.random() < 0.1, chance.random() < 0.2) for number in range(STOPS)}
    events = [
        (make_stop_event({"job_id": str(number)}, f"decision-{number}"), f"msg-{number}") for number in range(STOPS)
    ]
    for number in range(0, STOPS, 3):
        cluster.jobs[str(number)] = FakeJob(deaf=False, quits=False)
        events[number][0]["type"] = "run.park_requested"
    events += [
        (make_stop_event({"job_id": f"elsewhere-{number}"}, f"other-{number}"), f"o-{number}")
        for number in range(OTHERS)
    ]
    deliveries = [signed(*event) for event in events for _ in range(chance.choice((1, 1, 2, 3)))]
    chance.shuffle(deliveries)

    def unwell(path: str, body: Any) -> Answer | None:
        if chance.random() >= TROUBLE:
            return None
        service.scripted_answers.append(unwell)  # for what is answered is taken off the list
        return Answer(chance.choice((500, 503)), {})

    service.scripted_answers = [unwell]
    share = len(deliveries) // RESTARTS
    for life in range(RESTARTS):
        memory = Journal(tmp_path)
        around = ReceiverContext(cluster, memory, lambda: ReportClient(server.url, KEY, "fake"), BOUNDS, Metrics())
        receiver = Receiver(around, lambda: [SECRET])
        receiver.start()
        last = life == RESTARTS - 1
        for headers, body in deliveries[life * share : None if last else (life + 1) * share]:
            assert receiver.receive(headers, body, time.time()).status in (200, 202)
        if last:
            assert receiver.wait_idle(180)
        assert receiver.leave(60)
        if last:
            assert memory.unfinished() == []
            stops = [memory.of(f"decision-{number}") for number in range(STOPS)]
            assert all(one is not None and one.stop.phase is Phase.DONE and one.stop.told for one in stops)
            for number in range(0, STOPS, 6):
                event = {
                    **make_stop_event({"job_id": str(number)}, f"decision-{number}"),
                    "type": "run.resume_requested",
                }
                while receiver.receive(*signed(event, f"back-{number}"), time.time()).status == 503:
                    pass  # as the service sends it again
        memory.close()

    assert all(one.ends == 1 and not one.cancelled_early for one in cluster.jobs.values())
    told = Counter((decision, report["state"]) for decision, report in service.reports)
    assert {decision for decision, _ in told} == {f"decision-{number}" for number in range(STOPS)}
    parked = {f"decision-{number}" for number in range(0, STOPS, 3)}
    assert all(state == ("parked" if decision in parked else "confirmed") for decision, state in told)
    resumed = [number for number, one in cluster.jobs.items() if one.resumed]
    assert resumed == [str(number) for number in range(0, STOPS, 6)]
    assert sum(told.values()) <= STOPS + RESTARTS * 5  # told twice at most where the receiver ended in between
