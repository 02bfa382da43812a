"""What the rules that count consecutive values share: one role, a warm-up, and a stop at k."""

from __future__ import annotations

from typing import ClassVar

from evalstop_detectors.detectors.detector import Evidence, Kind, Thresholds
from evalstop_detectors.observation import MetricRole
from evalstop_detectors.wording import format_count


class CountingRule:
    """A rule on `role` that stops at a count of `k` and suspects one before it; `warmup_evals` are not counted."""

    __slots__ = ()

    kind: ClassVar[Kind] = Kind.COUNT

    k: int
    warmup_evals: int
    role: MetricRole

    @property
    def roles(self) -> frozenset[MetricRole]:
        return frozenset({self.role})

    @property
    def thresholds(self) -> Thresholds:
        return Thresholds(suspect_at=float(self.k - 1) if self.k > 1 else None, stop_at=float(self.k))

    def describe(self, seen: int, count: int, turn_step: int | None, noun: str, of: str) -> Evidence:
        """The evidence of `count` consecutive `noun`s `of` something, after `seen` finite values."""
        note = f"{format_count(count, f'consecutive {noun}')} of {of}, k = {self.k}"
        if seen < self.warmup_evals:
            note = f"warming up: {seen} of {format_count(self.warmup_evals, 'value')} of {self.role} seen"
        return Evidence(Kind.COUNT, float(count), turn_step, note)
