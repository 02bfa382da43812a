"""The result of a stream: its lines, and the state of its runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from uuid import UUID

from msgspec import Struct

from evalstop_service.ingest import Receipt
from evalstop_service.rules.run_results import BestCheckpoint, Call

MOST_ERRORS = 1000


class LineError(Struct, frozen=True):
    """The error of a line."""

    line: int
    title: str
    detail: str


class RunResult(Struct, frozen=True):
    """The state of a run after a stream, in the response."""

    run_id: UUID
    accepted: int
    verdict: Call
    should_stop: bool
    best_checkpoint: BestCheckpoint | None


class StreamResult(Struct, frozen=True):
    """The result of a stream, in the response."""

    lines: int
    accepted: int
    duplicates: int
    conflict_count: int
    error_count: int
    errors: list[LineError]
    runs: list[RunResult]


@dataclass(slots=True)
class RunTotals:
    """The state of a run after a stream."""

    accepted: int
    last: Receipt


@dataclass(slots=True)
class StreamTotals:
    """Counts of a stream's results; `lines`: this many, from the first on, are durable or refused."""

    lines: int = 0
    accepted: int = 0
    duplicates: int = 0
    conflict_count: int = 0
    error_count: int = 0
    runs: dict[UUID, RunTotals] = field(default_factory=dict)
    _errors: list[tuple[int, str, str]] = field(default_factory=list)

    def add_error(self, line: int, title: str, detail: str) -> None:
        """Record the error of a line; of many, only those of the first lines are kept."""
        self.error_count += 1
        self._errors.append((line, title, detail))
        if len(self._errors) >= 2 * MOST_ERRORS:
            self._errors = sorted(self._errors)[:MOST_ERRORS]

    def add_receipt(self, run_id: UUID, receipt: Receipt) -> None:
        """Count a receipt, except for its conflicts: each is recorded as the error of its line."""
        self.accepted += receipt.accepted
        self.duplicates += receipt.duplicates
        totals = self.runs.get(run_id)
        if totals is None:
            self.runs[run_id] = RunTotals(receipt.accepted, receipt)
        else:
            totals.accepted += receipt.accepted
            totals.last = receipt

    def result(self, now: datetime) -> StreamResult:
        """The totals for the response."""
        return StreamResult(
            lines=self.lines,
            accepted=self.accepted,
            duplicates=self.duplicates,
            conflict_count=self.conflict_count,
            error_count=self.error_count,
            errors=[LineError(*error) for error in sorted(self._errors)[:MOST_ERRORS]],
            runs=[_describe_run(run_id, totals, now) for run_id, totals in self.runs.items()],
        )


def _describe_run(run_id: UUID, totals: RunTotals, now: datetime) -> RunResult:
    run, decision = totals.last.run, totals.last.decision
    should_stop = decision is not None and decision.stops(now)
    return RunResult(run_id, totals.accepted, run.verdict.verdict, should_stop, run.best_checkpoint)
