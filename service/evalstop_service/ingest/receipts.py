"""Receipts for posted observations. Pure."""

from __future__ import annotations

from evalstop_service.ingest.messages import Receipt, ValueConflict
from evalstop_service.ingest.run_state import RunState
from evalstop_service.runs.watched_metrics import OWN_METRICS
from evalstop_service.store.decisions import Decision

MOST_UNWATCHED = 20
"""Metrics that a receipt lists as unwatched."""


def write_receipt(
    state: RunState,
    decision: Decision | None,
    accepted: int,
    duplicates: int,
    conflicts: tuple[ValueConflict, ...],
) -> Receipt:
    """The receipt for observations that left the run in this state."""
    missing, unwatched = _list_unwatched(state)
    return Receipt(
        state.run,
        decision,
        accepted,
        duplicates,
        conflicts=conflicts,
        missing=missing,
        unwatched=unwatched,
        eval_request=state.eval_request,
    )


def _list_unwatched(state: RunState) -> tuple[dict[str, str], list[str]]:
    """`Receipt.missing` and `Receipt.unwatched`."""
    metrics, last_steps = state.run.metrics, state.last_steps
    if state.watch.eval_metric is not None and metrics.keys() <= last_steps.keys():
        return {}, []
    missing = {metric: role["role"] for metric, role in metrics.items() if metric not in last_steps}
    unwatched = [metric for metric in last_steps if metric not in metrics and metric not in OWN_METRICS]
    return missing, unwatched[:MOST_UNWATCHED]
