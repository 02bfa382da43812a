"""The result of a stream: what became of its lines, and where its runs stand."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from uuid import UUID

from msgspec import Struct

from evalstop_service.ingest import Receipt
from evalstop_service.rules.run_results import BestCheckpoint, Call

MOST_ERRORS = 1000


class LineError(Struct, frozen=True):
    """What is wrong with a line."""

    line: int
    title: str
    detail: str


class RunResult(Struct, frozen=True):
    """Where a run stands after a stream, as it is answered."""

    run_id: UUID
    accepted: int
    verdict: Call
    should_stop: bool
    best_checkpoint: BestCheckpoint | None


class StreamResult(Struct, frozen=True):
    """What became of a stream, as it is answered."""

    lines: int
    accepted: int
    duplicates: int
    conflict_count: int
    error_count: int
    errors: list[LineError]
    runs: list[RunResult]


@dataclass(slots=True)
class Standing:
    """Where a run stands after what a stream told of it."""

    accepted: int
    last: Receipt


@dataclass(slots=True)
class StreamTotals:
    """What became of a stream's lines; `lines`: of so many, from the first on, all is durable or refused."""

    lines: int = 0
    accepted: int = 0
    duplicates: int = 0
    conflict_count: int = 0
    error_count: int = 0
    runs: dict[UUID, Standing] = field(default_factory=dict)
    _errors: list[tuple[int, str, str]] = field(default_factory=list)

    def wrong(self, line: int, title: str, detail: str) -> None:
        """Note what is wrong with a line; of many, those of the first lines are kept."""
        self.error_count += 1
        self._errors.append((line, title, detail))
        if len(self._errors) >= 2 * MOST_ERRORS:
            self._errors = sorted(self._errors)[:MOST_ERRORS]

    def stored(self, run_id: UUID, receipt: Receipt) -> None:
        """Count what a receipt says, but for its contradictions: each is wrong by a line of its own."""
        self.accepted += receipt.accepted
        self.duplicates += receipt.duplicates
        standing = self.runs.get(run_id)
        if standing is None:
            self.runs[run_id] = Standing(receipt.accepted, receipt)
        else:
            standing.accepted += receipt.accepted
            standing.last = receipt

    def result(self, now: datetime) -> StreamResult:
        """The totals as they are answered."""
        return StreamResult(
            lines=self.lines,
            accepted=self.accepted,
            duplicates=self.duplicates,
            conflict_count=self.conflict_count,
            error_count=self.error_count,
            errors=[LineError(*error) for error in sorted(self._errors)[:MOST_ERRORS]],
            runs=[_describe_run(run_id, standing, now) for run_id, standing in self.runs.items()],
        )


def _describe_run(run_id: UUID, standing: Standing, now: datetime) -> RunResult:
    run, decision = standing.last.run, standing.last.decision
    should_stop = decision is not None and decision.stops(now)
    return RunResult(run_id, standing.accepted, run.verdict.verdict, should_stop, run.best_checkpoint)
