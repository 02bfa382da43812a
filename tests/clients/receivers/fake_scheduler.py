"""A fake scheduler with one job, in memory, that implements JobControl."""

from __future__ import annotations

import threading
from collections.abc import Collection
from dataclasses import dataclass, field

from evalstop_client.errors import RequestRefused, SchedulerUnavailable
from evalstop_client.receivers.stop.job_control import Gone, Job, JobControl, Parked, Present, StopRequest

UNAVAILABLE = SchedulerUnavailable("it is being restarted")


@dataclass
class FakeScheduler(JobControl):
    """One job, called 7; `calls` is what was done to it, in order.

    `ends_on`: the call that ends the job, None for none. `saves`: whether the job can be asked for a checkpoint.
    `refusal` and `error`: what find_job refuses with, and what every call raises. While `may_answer` is cleared,
    find_job blocks.
    """

    ends_on: str | None = "cancel"
    saves: bool = True
    is_mine: bool = True
    has_others_waiting: bool = False
    refusal: str | None = None
    error: Exception | None = None
    gone: bool = False
    part: str | None = None
    calls: list[str] = field(default_factory=list)
    requests: list[StopRequest] = field(default_factory=list)
    may_answer: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.may_answer.set()

    def others_wait(self, job: Job, parked: Collection[Job]) -> bool:
        return self.has_others_waiting

    def find_job(self, request: StopRequest) -> Job | None:
        self.requests.append(request)
        self.may_answer.wait(20)
        self._raise_error()
        if self.refusal is not None:
            raise RequestRefused(self.refusal)
        return Job("7", {"user": "ann"}) if self.is_mine else None

    def request_checkpoint(self, job: Job, request: StopRequest) -> bool:
        self._record("request_checkpoint")
        return self.saves

    def cancel_job(self, job: Job, request: StopRequest) -> None:
        self._record("cancel")

    def kill_job(self, job: Job) -> None:
        self._record("kill")

    def check_job(self, job: Job) -> Present | Gone:
        self._raise_error()
        return Gone("ENDED", {"exit_status": -15}) if self.gone else Present("RUNNING")

    def park_job(self, job: Job, request: StopRequest) -> None:
        self._record("park")

    def check_parked(self, job: Job) -> Present | Parked | Gone:
        state = self.check_job(job)
        return Parked("HELD", {"parked_as": "held"}) if isinstance(state, Gone) and "park" in self.calls else state

    def resume_job(self, job: Job) -> None:
        self._record("resume")

    def _record(self, call: str) -> None:
        self._raise_error()
        self.calls.append(call)
        if call == self.ends_on:
            self.gone = True

    def _raise_error(self) -> None:
        if self.error is not None:
            raise self.error
