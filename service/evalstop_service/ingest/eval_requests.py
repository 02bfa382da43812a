"""Requests to evaluate now: created for a run's monitor, stored as rows, answered by an observation."""

from __future__ import annotations

from datetime import datetime, timedelta

from evalstop_detectors import Kind, find_request
from msgspec.structs import replace

from evalstop_service.ingest.messages import EvalAnswered
from evalstop_service.ingest.run_state import RunState
from evalstop_service.rules.statuses import RunStatus
from evalstop_service.store import eval_requests
from evalstop_service.store.database import Transaction
from evalstop_service.store.eval_requests import EvalRequest
from evalstop_service.store.ids import new_id

OPEN_FOR = timedelta(hours=6)
"""After this nobody is asked any more. A later answer is still accepted."""


def save_answer(tx: Transaction, state: RunState, content: EvalAnswered, now: datetime) -> None:
    """Write the answer, which has become an observation, to its request."""
    request = eval_requests.find_request(tx, state.run.id, content.request_id)
    if request is None:
        return
    request = replace(
        request,
        answered_at=now,
        actor=content.actor,
        difference=content.point.value,
        stderr=content.point.stderr,
        prompts=content.prompts,
        probability_after=_find_probability(state),
    )
    eval_requests.save_answer(tx, request)


def raise_request(tx: Transaction, before: RunState, state: RunState, now: datetime) -> EvalRequest | None:
    """Store what the monitor newly asks for; None: nothing, or there is no checkpoint to compare.

    A replay may ask at another step than the first time: the latest request counts. A new attempt asks again for what
    an earlier one has left unanswered, since an answer counts for its attempt alone.
    """
    policy_request, run = find_request(state.policy, state.monitor), state.run
    if policy_request is None or run.status != RunStatus.RUNNING:
        return None
    if policy_request == find_request(before.policy, before.monitor) and run.attempt == before.run.attempt:
        return None
    best = run.best_checkpoint
    if best is None or best.step >= policy_request.step:
        return None
    request = EvalRequest(
        id=new_id(),
        run_id=run.id,
        project_id=run.project_id,
        attempt=run.attempt,
        step=policy_request.step,
        number=policy_request.number,
        multiplier=policy_request.multiplier,
        best_step=best.step,
        best_uri=best.uri,
        probability=_find_probability(state),
        created_at=now,
        deadline_at=now + OPEN_FOR,
    )
    return request if eval_requests.add_request(tx, request) else None


def keep_open_request(state: RunState, raised: EvalRequest | None) -> EvalRequest | None:
    """The request that awaits its answer: the one created now, or else the previous one."""
    policy_request = find_request(state.policy, state.monitor)
    if policy_request is None:
        return None
    stored, place = raised or state.eval_request, (state.run.attempt, policy_request.step)
    return stored if stored is not None and (stored.attempt, stored.step) == place else None


def _find_probability(state: RunState) -> float | None:
    """The probability that the run has turned, from the detector that reports one."""
    posteriors = (item.value for item in state.monitor.evidence if item is not None and item.kind is Kind.POSTERIOR)
    return max(posteriors, default=None)
