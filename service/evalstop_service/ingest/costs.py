"""What messages cost beyond their share: steps of detectors past their budget, and runs that are stepped again."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from datetime import datetime
from uuid import UUID

from evalstop_service.errors import TooOften
from evalstop_service.ingest.apply import Applied, apply
from evalstop_service.ingest.facts import Facts, Needs
from evalstop_service.ingest.messages import Message
from evalstop_service.ingest.run_state import RunState
from evalstop_service.security.rate_limits import Rate, RateLimit

REPLAYS = Rate(burst=500, per_second=100)
"""Milliseconds of the processor in which runs may be stepped again for a key's late observations: a tenth of one.

Time is measured, for a stored observation costs one policy many times what it costs another.
"""


class CostlyRuns(dict[UUID, float]):
    """The runs whose detectors took longer than their budget, as long as they do, with the seconds of the last step."""

    def __init__(self, budget_seconds: float) -> None:
        super().__init__()
        self._budget_seconds = budget_seconds

    def weigh_step(self, run_id: UUID, seconds: float) -> bool:
        """Take in what a step took; whether that was past the budget. One well within it makes a run like others."""
        if seconds > self._budget_seconds:
            self[run_id] = seconds
            return True
        if self and seconds < self._budget_seconds / 4:
            self.pop(run_id, None)
        return False

    def find_among(self, run_ids: Collection[UUID]) -> dict[UUID, float]:
        """The seconds of those of these runs that are costly."""
        return {run_id: seconds for run_id, seconds in self.items() if run_id in run_ids}


class ReplayShares:
    """How much of the processor each key has for stepping runs again by late observations."""

    def __init__(self, rate: Rate = REPLAYS) -> None:
        self._limit = RateLimit(rate)

    def find_objection(self, message: Message, needs: Needs) -> TooOften | None:
        """Why a message has to wait: it would have its run stepped again, and its key had too much of that."""
        if not needs.series or message.sender is None:
            return None
        if wait := self._limit.find_wait(str(message.sender)):
            return TooOften("late observations had runs stepped again, too many for this key; wait a while", wait)
        return None

    def apply(self, state: RunState, messages: Sequence[Message], facts: Facts, now: datetime) -> Applied | Needs:
        """What `ingest.apply` gives. If it steps a run again, the first message's key pays. For any thread."""
        if not facts.points:
            return apply(state, messages, facts, now)
        begun = time.thread_time()
        result = apply(state, messages, facts, now)
        self.charge(messages[0], time.thread_time() - begun)
        return result

    def charge(self, message: Message, seconds: float) -> None:
        """Have a key pay for the time of the processor in which a run was stepped again for its message."""
        if message.sender is not None:
            self._limit.charge(str(message.sender), seconds * 1000)
