"""What the detectors that tests write have in common."""

from __future__ import annotations

from typing import Any, ClassVar

from evalstop_detectors import Detector, Kind, MetricRole, Thresholds


class FakeDetector(Detector[int], frozen=True):
    """Counts the evals that it has seen; a subclass gives its name, and its `step`."""

    kind: ClassVar[Kind] = Kind.COUNT
    state_type: ClassVar[type[Any]] = int
    roles: ClassVar[frozenset[MetricRole]] = frozenset({MetricRole.EVAL})
    thresholds: ClassVar[Thresholds] = Thresholds(None, 1.0)
