"""A fake scheduler in memory that is an action itself: its jobs save, end, hang, and it goes away when told to."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from evalstop_client.errors import RequestRefused, SchedulerUnavailable
from evalstop_client.receivers import ForeignJob, Gone, Job, Parked, Present, StopRequest


@dataclass
class FakeScheduler:
    """One job, called 7; `verbs` is what was done to it, in order.

    `ends_on`: the verb that ends it, None for nothing. `saves`: whether it can be asked for a checkpoint.
    """

    ends_on: str | None = "cancel"
    saves: bool = True
    is_mine: bool = True
    refusal: str | None = None
    trouble: Exception | None = None
    gone: bool = False
    name: str = "fake action"
    verbs: list[str] = field(default_factory=list)
    asked: list[StopRequest] = field(default_factory=list)
    go_on: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.go_on.set()

    def find_job(self, request: StopRequest) -> Job | ForeignJob:
        self.asked.append(request)
        self.go_on.wait(20)
        self._answer()
        if self.refusal is not None:
            raise RequestRefused(self.refusal)
        return Job("7", {"user": "ann"}) if self.is_mine else ForeignJob()

    def request_checkpoint(self, job: Job, request: StopRequest) -> bool:
        self._do("request_checkpoint")
        return self.saves

    def cancel_job(self, job: Job, request: StopRequest) -> None:
        self._do("cancel")

    def kill_job(self, job: Job) -> None:
        self._do("force")

    def check_job(self, job: Job) -> Present | Gone:
        self._answer()
        return Gone("ENDED", {"exit_status": -15}) if self.gone else Present("RUNNING")

    def park_job(self, job: Job, request: StopRequest) -> None:
        self._do("park")

    def check_parked(self, job: Job) -> Present | Parked | Gone:
        seen = self.check_job(job)
        return Parked("HELD", {"parked_as": "held"}) if isinstance(seen, Gone) and "park" in self.verbs else seen

    def resume_job(self, job: Job) -> None:
        self._do("undo")

    def _do(self, verb: str) -> None:
        self._answer()
        self.verbs.append(verb)
        if verb == self.ends_on:
            self.gone = True

    def _answer(self) -> None:
        if self.trouble is not None:
            raise self.trouble


AWAY = SchedulerUnavailable("it is being restarted")
