"""The tally of a stream: what became of its lines, and where its runs stand."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

from evalstop_service.ingest import Receipt

MOST_ERRORS = 1000


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

    def document(self, now: datetime) -> dict[str, Any]:
        """The tally as JSON has it."""
        errors = sorted(self._errors)[:MOST_ERRORS]
        return {
            "lines": self.lines,
            "accepted": self.accepted,
            "duplicates": self.duplicates,
            "conflict_count": self.conflict_count,
            "error_count": self.error_count,
            "errors": [{"line": line, "title": title, "detail": detail} for line, title, detail in errors],
            "runs": [_standing(run_id, standing, now) for run_id, standing in self.runs.items()],
        }


def _standing(run_id: UUID, standing: Standing, now: datetime) -> dict[str, Any]:
    run, decision = standing.last.run, standing.last.decision
    return {
        "run_id": str(run_id),
        "accepted": standing.accepted,
        "verdict": run.verdict.verdict,
        "should_stop": decision is not None and decision.stops(now),
        "best_checkpoint": run.best_checkpoint,
    }
