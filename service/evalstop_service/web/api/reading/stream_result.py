"""The result of a stream: its lines, and the state of its runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from evalstop_service.ingest import Receipt
from evalstop_service.store.decisions import Decision

MOST_ERRORS = 1000


@dataclass(slots=True)
class StreamTotals:
    """Counts of a stream's results; `lines`: this many, from the first on, are durable or refused."""

    lines: int = 0
    duplicates: int = 0
    conflict_count: int = 0
    error_count: int = 0
    accepted: Counter[UUID] = field(default_factory=Counter)
    _last: dict[UUID, Receipt] = field(default_factory=dict)
    _errors: list[tuple[int, str, str]] = field(default_factory=list)

    def add_error(self, line: int, title: str, detail: str) -> None:
        """Record the error of a line; of many, only those of the first lines are kept."""
        self.error_count += 1
        self._errors.append((line, title, detail))
        if len(self._errors) >= 2 * MOST_ERRORS:
            self._errors = sorted(self._errors)[:MOST_ERRORS]

    def add_receipt(self, run_id: UUID, receipt: Receipt) -> None:
        """Count a receipt, except for its conflicts: each is recorded as the error of its line."""
        self.accepted[run_id] += receipt.accepted
        self.duplicates += receipt.duplicates
        self._last[run_id] = receipt

    def list_decisions(self) -> list[Decision]:
        """The decisions on the runs of the stream."""
        return [receipt.decision for receipt in self._last.values() if receipt.decision is not None]

    def result(self, told: Collection[UUID]) -> dict[str, Any]:
        """The totals for the response; `told`: the decisions whose trainers are told to stop."""
        return {
            "lines": self.lines,
            "accepted": self.accepted.total(),
            "duplicates": self.duplicates,
            "conflict_count": self.conflict_count,
            "error_count": self.error_count,
            "errors": [
                {"line": line, "title": title, "detail": detail}
                for line, title, detail in sorted(self._errors)[:MOST_ERRORS]
            ],
            "runs": [
                {
                    "run_id": run_id,
                    "accepted": self.accepted[run_id],
                    "verdict": receipt.run.verdict.verdict,
                    "should_stop": receipt.decision is not None and receipt.decision.id in told,
                    "best_checkpoint": receipt.run.best_checkpoint,
                }
                for run_id, receipt in self._last.items()
            ],
        }
