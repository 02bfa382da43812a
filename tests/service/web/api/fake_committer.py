"""A committer for tests that stores in a dictionary and can be made to wait or to fail."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from datetime import UTC, datetime
from uuid import UUID

from evalstop_service.domain.decision_lifecycle import Mode
from evalstop_service.domain.run import Call, Verdict
from evalstop_service.domain.statuses import RunStatus
from evalstop_service.errors import NotFound
from evalstop_service.ingest import Message, Observations, Receipt, ValueConflict
from evalstop_service.store.runs import Run

NOW = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)


@dataclass
class FakeCommitter:
    """Stores observations of the runs in `known`.

    `values` holds what was stored, `messages` every message as (run, number of observations), in order. An entry of
    `failures` is raised for each message until none is left. While `open` is not set, `submit` waits.
    """

    known: set[UUID]
    failures: list[Exception] = field(default_factory=list)
    open: asyncio.Event | None = None
    values: dict[tuple[UUID, str, int], float] = field(default_factory=dict)
    messages: list[tuple[UUID, int]] = field(default_factory=list)
    under_way: int = 0

    async def submit(self, message: Message) -> Receipt:
        assert isinstance(message.content, Observations)
        points = message.content.points
        self.under_way += len(points)
        try:
            await (self.open.wait() if self.open is not None else asyncio.sleep(0))
        finally:
            self.under_way -= len(points)
        self.messages.append((message.run_id, len(points)))
        if self.failures:
            raise self.failures.pop(0)
        if message.run_id not in self.known:
            raise NotFound(f"there is no run {message.run_id}")
        accepted, conflicts = 0, []
        for point in points:
            stored = self.values.get((message.run_id, *point.identity))
            if stored is None:
                self.values[message.run_id, *point.identity] = point.value
                accepted += 1
            elif stored != point.value and not (math.isnan(stored) and math.isnan(point.value)):
                conflicts.append(ValueConflict(point, stored))
        duplicates = len(points) - accepted - len(conflicts)
        run = build_run(message.run_id)
        return Receipt(run, None, accepted, duplicates, conflicts=tuple(conflicts))


def build_run(run_id: UUID) -> Run:
    """A run with default values in all fields."""
    return Run(
        id=run_id,
        project_id=run_id,
        name="r",
        status=RunStatus.RUNNING,
        attempt=1,
        metrics={},
        labels={},
        policy_id=run_id,
        policy_name="p",
        policy_version=1,
        mode=Mode.SHADOW,
        total_steps=None,
        last_step=None,
        version=1,
        verdict=Verdict(Call.CONTINUE, None, None, ""),
        best_checkpoint=None,
        raw_maximum=None,
        created_at=NOW,
        updated_at=NOW,
        ended_at=None,
    )
