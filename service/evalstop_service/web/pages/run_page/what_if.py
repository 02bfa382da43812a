"""Replays a run with another policy or threshold, to show what it would have done; stores nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any
from uuid import UUID

from evalstop_detectors import (
    DetectorError,
    Evidence,
    Policy,
    Scores,
    Verdict,
    choose_best,
    policy_from_document,
    policy_to_document,
)
from evalstop_detectors.detectors.detector import Kind, Thresholds
from evalstop_detectors.policy.catalog import Action
from fastapi import APIRouter, Query, Response
from msgspec import structs

from evalstop_service.errors import Invalid, NotFound
from evalstop_service.evaluation.backtests import Replay, replay_run
from evalstop_service.projects import policies
from evalstop_service.projects.policies import Version
from evalstop_service.runs.watched_metrics import list_watched, select_evals
from evalstop_service.store import decisions, run_details, series
from evalstop_service.store.database import Transaction
from evalstop_service.store.decisions import Decision
from evalstop_service.store.run_details import Checkpoint
from evalstop_service.store.runs import Run
from evalstop_service.web.pages.formatting import format_number, format_step
from evalstop_service.web.pages.responses import PageRoute, send_json
from evalstop_service.web.pages.visitor import SignedIn, SiteOf

router = APIRouter(prefix="/runs/{run_id}", route_class=PageRoute)

TOO_LONG = "The run is too long to replay here; a backtest replays it in the background."

Threshold = Annotated[float | None, Query(gt=0, allow_inf_nan=False)]


@router.get("/what-if.json")
def replay_policy(
    run_id: UUID,
    site: SiteOf,
    visitor: SignedIn,
    policy: Annotated[str, Query(max_length=100)],
    stop_at: Threshold = None,
) -> Response:
    """Where a policy would have stopped the run; `stop_at`: another threshold of its first detector that can stop
    runs."""
    with site.database.reading() as tx:
        run = visitor.load_run(tx, run_id)
        reference = _find_policy(tx, run.project_id, policy)
        if any(series.is_long_series(tx, run.id, metric) for metric in list_watched(run)):
            return _create_answer(TOO_LONG)
        try:
            tried = _change_threshold(policy_from_document(reference.document, stored=True), stop_at)
            replay = replay_run(tx, run, tried)
        except DetectorError as error:
            return _create_answer(f"{reference.name} cannot be replayed: {error}.")
        saved = run_details.list_checkpoints(tx, run.id)
        decision = decisions.find_decision_of_attempt(tx, run.id, run.attempt)
    stop = next((verdict for verdict in replay.verdicts if verdict.stops), None)
    return _create_answer(
        _describe_stop(run, tried, stop_at, replay, stop, decision, saved),
        step=stop.step if stop else None,
        reason=(stop or replay.verdicts[-1]).reason,
        threshold=_describe_threshold(tried, replay.evidence),
    )


def _find_policy(tx: Transaction, project_id: UUID, reference: str) -> Version:
    try:
        return policies.find_referred_policy(tx, project_id, reference)
    except Invalid as error:
        raise NotFound(str(error)) from error


def _create_answer(
    sentence: str, *, step: int | None = None, reason: str = "", threshold: dict[str, Any] | None = None
) -> Response:
    return send_json({"sentence": sentence, "step": step, "reason": reason, "threshold": threshold})


def _find_main_member(policy: Policy) -> int | None:
    """The first member that can stop a run."""
    calling = (
        index for index, item in enumerate(policy.members) if item.weight and item.thresholds.stop_at is not None
    )
    return next(calling, None)


def _change_threshold(policy: Policy, stop_at: float | None) -> Policy:
    """The policy with another threshold of its main member; raises InvalidPolicy when that cannot be reached."""
    index = _find_main_member(policy)
    if stop_at is None or index is None:
        return policy
    members = list(policy.members)
    thresholds = Thresholds(members[index].thresholds.suspect_at, stop_at)
    members[index] = structs.replace(members[index], thresholds=thresholds)
    return policy_from_document(policy_to_document(structs.replace(policy, members=tuple(members))))


def _describe_threshold(policy: Policy, evidence: Sequence[Evidence | None]) -> dict[str, Any] | None:
    """The adjustable threshold and its range; None if there is none yet."""
    index = _find_main_member(policy)
    main_evidence = None if index is None else evidence[index]
    if index is None or main_evidence is None:
        return None
    stop_at = policy.members[index].thresholds.stop_at
    assert stop_at is not None, "it can stop a run"
    lowest, highest, increment = _RANGES.get(main_evidence.kind, (0.5, 20.0, 0.5))
    return {
        "member": policy.ids[index],
        "kind": main_evidence.kind,
        "stop_at": stop_at,
        "lowest": lowest,
        "highest": highest,
        "increment": increment,
    }


_RANGES = {Kind.POSTERIOR: (0.5, 0.99, 0.01), Kind.FRACTION: (0.5, 0.99, 0.01), Kind.COUNT: (1.0, 20.0, 1.0)}


def _describe_stop(
    run: Run,
    policy: Policy,
    stop_at: float | None,
    replay: Replay,
    stop: Verdict | None,
    decision: Decision | None,
    saved: Sequence[Checkpoint],
) -> str:
    """What the policy would have done, in one sentence."""
    index = _find_main_member(policy)
    threshold_text = (
        "" if stop_at is None or index is None else f", with {policy.ids[index]} at {format_number(stop_at)},"
    )
    name, verb = f"{policy.name}{threshold_text}", "parked" if policy.action is Action.PARK else "stopped"
    if stop is None or stop.step is None:
        until = "" if run.last_step is None else f" up to step {format_step(run.last_step)}, its last"
        return f"{name} would not have {verb} this run{until}."
    description = f"{name} would have {verb} this run at step {format_step(stop.step)}"
    description += _compare_steps(stop.step, run, decision)
    if policy.action is Action.PARK and not replay.verdicts[-1].stops:
        description += ", to return later"
    return f"{description}; {_describe_best(stop.step, run, replay, saved)}."


def _compare_steps(step: int, run: Run, decision: Decision | None) -> str:
    if decision is None:
        remaining_steps = (run.last_step or step) - step
        return f", {format_step(remaining_steps)} steps before its last" if remaining_steps > 0 else ""
    apart = decision.step - step
    if apart == 0:
        return ", as on record"
    return f", {format_step(abs(apart))} steps {'sooner' if apart > 0 else 'later'} than on record"


def _describe_best(step: int, run: Run, replay: Replay, saved: Sequence[Checkpoint]) -> str:
    """The checkpoint that would have been the best at this step."""
    evals = [score for score in select_evals(run, replay.observations) if score.step <= step]
    addresses = {checkpoint.step: checkpoint.uri for checkpoint in saved if checkpoint.step <= step}
    best = choose_best(Scores().add_scores(evals).add_checkpoints(addresses))
    if best is None:
        return "no checkpoint had an eval by then"
    return f"the best checkpoint would be that of step {format_step(best.step)}"
