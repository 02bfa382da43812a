"""Where a run that has ended turned, told from all of its gold scores."""

from __future__ import annotations

from typing import Any

from evalstop_detectors.checkpoint.change_point import turn

from evalstop_service.runs import watched_metrics
from evalstop_service.store import observations
from evalstop_service.store.database import Transaction
from evalstop_service.store.runs import Run


def find_change_point(tx: Transaction, run: Run) -> dict[str, Any] | None:
    """The turn of a run as it is answered; None where gold shows no fall. `gain` and `drop` are in the unit of gold."""
    gold = watched_metrics.find_eval_metric(run)
    if gold is None:
        return None
    found = turn(watched_metrics.select_scores(run, observations.load_series(tx, run.id, [gold])))
    if found is None:
        return None
    return {
        "step": found.step,
        "low_step": found.low_step,
        "high_step": found.high_step,
        "gain": found.gain,
        "drop": found.drop,
    }
