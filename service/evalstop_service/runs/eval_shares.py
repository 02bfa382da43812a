"""How much each of several evals contributes to the score that combines them. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from evalstop_detectors import combine_values, start_combining

from evalstop_service.runs.watched_metrics import find_combined_evals, select_eval_values
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.runs import Run


@dataclass(frozen=True)
class EvalShare:
    """One of several evals.

    `change`: its contribution to the score since the score's best, below 0 if it fell. `missing`: it has no recent
    value, and the score is computed from the others.
    """

    metric: str
    weight: float
    critical: bool
    change: float
    missing: bool


def list_shares(run: Run, points: Iterable[PostedObservation]) -> list[EvalShare]:
    """The evals of a run that has several, largest fall first, from all their observations."""
    weights = find_combined_evals(run)
    state, _ = combine_values(tuple(weights.values()), start_combining(len(weights)), select_eval_values(run, points))
    shares = [
        EvalShare(metric, weight, run.metrics[metric].get("critical", False), -fall, not item.counts)
        for (metric, weight), fall, item in zip(weights.items(), state.falls, state.evals, strict=True)
    ]
    return sorted(shares, key=lambda share: share.change)
