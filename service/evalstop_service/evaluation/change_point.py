"""The change point in hindsight: where an ended run turned, by all of its eval scores."""

from __future__ import annotations

from collections.abc import Sequence

from evalstop_detectors import Score, select_version
from evalstop_detectors.checkpoint.change_point import locate_change_point
from msgspec.structs import astuple

from evalstop_service.rules.run_results import ChangePoint
from evalstop_service.runs import watched_metrics
from evalstop_service.store import observations
from evalstop_service.store.database import Transaction
from evalstop_service.store.runs import Run


def load_change_point(tx: Transaction, run: Run) -> ChangePoint | None:
    """The change point of a run; None where the eval shows no drop."""
    metric = watched_metrics.find_eval_metric(run)
    if metric is None:
        return None
    return find_change_point(watched_metrics.select_scores(run, observations.load_series(tx, run.id, [metric])))


def find_change_point(scores: Sequence[Score]) -> ChangePoint | None:
    """The change point among scores by ascending step, using only those measured like the last one."""
    located = locate_change_point(select_version(scores))
    return ChangePoint(*astuple(located)) if located is not None else None
