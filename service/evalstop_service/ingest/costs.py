"""What messages may cost, and how much of it is committed together."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from uuid import UUID

from evalstop_service.errors import TooOften
from evalstop_service.ingest.messages import Message
from evalstop_service.security.rate_limits import Rate, RateLimit

REPLAYS = Rate(burst=500, per_second=100)
"""CPU milliseconds that a key's edits may spend on replays: a tenth of one CPU. Its project may spend twice that.

Time is measured, because a stored observation costs one policy many times what it costs another.
"""


@dataclass(frozen=True)
class Limits:
    """Limits on what is committed together and on what may wait.

    `commits`: concurrent commits, started when earlier ones are slow; the embedded database has one writer.
    `slow_seconds`: a commit that takes longer no longer blocks others, since it may wait for a lock that they do not
    need. `edits`: concurrent edits, each in a thread. `requests`, `observations`: in one commit. `waiting`:
    observations waiting or in a commit. `step_seconds`: a run whose detectors took longer in one commit is committed
    separately. `replays`: per key.
    """

    commits: int = 4
    edits: int = 2
    requests: int = 1000
    observations: int = 20_000
    waiting: int = 200_000
    step_seconds: float = 0.2
    slow_seconds: float = 0.05
    replays: Rate = REPLAYS


class CostlyRuns(dict[UUID, float]):
    """The runs whose detectors exceed their budget, with the seconds of the last such step."""

    def __init__(self, budget_seconds: float) -> None:
        super().__init__()
        self._budget_seconds = budget_seconds

    def weigh_step(self, run_id: UUID, seconds: float) -> bool:
        """Record the time of a step; returns whether it exceeded the budget. A step well within it clears the run."""
        if seconds > self._budget_seconds:
            self[run_id] = seconds
            return True
        if self and seconds < self._budget_seconds / 4:
            self.pop(run_id, None)
        return False

    def find_among(self, run_ids: Collection[UUID]) -> dict[UUID, float]:
        """The seconds of these runs that are costly."""
        return {run_id: seconds for run_id, seconds in self.items() if run_id in run_ids}


class EditCosts:
    """The share of processor time that the edits of each key, and of each project, may spend on replays. Thread-safe.

    `step_seconds`: see `Limits`.
    """

    def __init__(self, limits: Limits) -> None:
        self._limit = RateLimit(limits.replays)
        self._limit_of_project = RateLimit(Rate(2 * limits.replays.burst, 2 * limits.replays.per_second))
        self.step_seconds = limits.step_seconds

    def require_share(self, message: Message) -> None:
        """Raise TooOften when a message would replay its run, and its key or project has used up its share."""
        if message.sender is not None:
            self.require_room(message.sender, message.project_id)

    def require_room(self, key_id: UUID, project_id: UUID) -> None:
        """Raise TooOften when a key or its project has used up its share, as before it changes the plan of a run."""
        if wait := max(self._limit.find_wait(key_id), self._limit_of_project.find_wait(project_id)):
            detail = "edits of this key or project, such as late observations or changed plans, caused too many replays"
            raise TooOften(f"{detail}; retry later", wait)

    def charge(self, message: Message, seconds: float) -> None:
        """Charge a key and its project for the processor time of the replay that its message caused."""
        if message.sender is not None:
            self._limit.charge(message.sender, seconds * 1000)
            self._limit_of_project.charge(message.project_id, seconds * 1000)
