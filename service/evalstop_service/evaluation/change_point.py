"""The change point in hindsight: where a run that has ended turned, by all of its eval scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from evalstop_detectors import Score
from evalstop_detectors.checkpoint.change_point import locate_change_point

from evalstop_service.runs import watched_metrics
from evalstop_service.store import observations
from evalstop_service.store.database import Transaction
from evalstop_service.store.runs import Run


def find_change_point(tx: Transaction, run: Run) -> dict[str, Any] | None:
    """The change point of a run as it is answered; None where the eval shows no drop."""
    metric = watched_metrics.find_eval_metric(run)
    if metric is None:
        return None
    return describe_change_point(watched_metrics.select_scores(run, observations.load_series(tx, run.id, [metric])))


def describe_change_point(scores: Sequence[Score]) -> dict[str, Any] | None:
    """The change point among scores by ascending step, as it is answered."""
    change_point = locate_change_point(scores)
    document: dict[str, Any] | None = msgspec.to_builtins(change_point)
    return document
