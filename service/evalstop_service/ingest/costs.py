"""The cost of messages: detector steps over budget, and replays of runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from datetime import datetime
from uuid import UUID

from evalstop_service.errors import TooOften
from evalstop_service.ingest.applied import Applied
from evalstop_service.ingest.apply import apply
from evalstop_service.ingest.facts import Facts, Needs
from evalstop_service.ingest.messages import Message
from evalstop_service.ingest.run_state import RunState
from evalstop_service.security.rate_limits import Rate, RateLimit

REPLAYS = Rate(burst=500, per_second=100)
"""CPU milliseconds that a key's late observations may spend on replays: a tenth of one CPU.

Time is measured, because a stored observation costs one policy many times what it costs another.
"""


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


class ReplayShares:
    """The share of CPU time that each key may spend on replays caused by late observations."""

    def __init__(self, rate: Rate = REPLAYS) -> None:
        self._limit = RateLimit(rate)

    def find_objection(self, message: Message, needs: Needs) -> TooOften | None:
        """Why a message has to wait: it would replay its run, and its key has used up its share."""
        if not needs.series or message.sender is None:
            return None
        if wait := self._limit.find_wait(message.sender):
            return TooOften("late observations of this key caused too many replays; retry later", wait)
        return None

    def apply(
        self,
        state: RunState,
        messages: Sequence[Message],
        facts: Facts,
        now: datetime,
        clock: Callable[[], float] = time.thread_time,
    ) -> tuple[Applied | Needs, float]:
        """The result of `ingest.apply`, and its seconds, by default of CPU time, without its pauses. Thread-safe.

        If it replays a run, the first message's key is charged.
        """
        started = clock()
        result = apply(state, messages, facts, now)
        seconds = clock() - started
        if facts.points:
            self.charge(messages[0], seconds)
        return result, seconds

    def charge(self, message: Message, seconds: float) -> None:
        """Charge a key for the CPU time of a replay caused by its message."""
        if message.sender is not None:
            self._limit.charge(message.sender, seconds * 1000)
