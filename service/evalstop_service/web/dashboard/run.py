"""The page of one run: where it stands, its chart, its decisions, and the numbers behind them."""

from __future__ import annotations

import math
from datetime import datetime
from typing import Any
from uuid import UUID

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from evalstop_service.rules.decision_lifecycle import NEXT_STATES, DecisionState
from evalstop_service.runs import health, metric_roles
from evalstop_service.store import decisions, observations, outcomes, run_health, runs, series, verdicts
from evalstop_service.store.decisions import Decision
from evalstop_service.store.observations import MAX_STEP, LatestObservation, Point
from evalstop_service.store.runs import Run
from evalstop_service.web.dashboard import formatting, roles
from evalstop_service.web.dashboard.downsampling import outlined, thin
from evalstop_service.web.dashboard.live_updates import Seen, follow
from evalstop_service.web.dashboard.responses import PageRoute, page
from evalstop_service.web.dashboard.visitor import SignedIn, SiteOf

router = APIRouter(prefix="/runs/{run_id}", route_class=PageRoute)

MOST_POINTS = 2000
MOST_METRICS = 100
MOST_VERDICTS = 20
CHARTED = ("eval", "proxy", "kl")


@router.get("")
def show_run(run_id: UUID, site: SiteOf, visitor: SignedIn) -> Response:
    """A run with its present decision, and those of its earlier attempts."""
    with site.database.reading() as tx:
        # Read first: what follows may be newer, never older.
        revision = runs.read_run_revision(tx, visitor.project.id, run_id)
        run = visitor.run(tx, run_id)
        on_record = decisions.list_decisions(tx, run.project_id, run_id=run.id)
        histories = {decision.id: decisions.list_changes(tx, decision) for decision in on_record}
        judged = {decision.id: outcomes.find_outcome(tx, run.id, decision.attempt) for decision in on_record}
        changes = verdicts.list_verdicts(tx, run.id, limit=MOST_VERDICTS)
        metrics = _by_role(run, observations.list_latest(tx, run.id))
        resumed_from = runs.get_resumed_step(tx, run)
        stored = run_health.load_health(tx, [run.id]).get(run.id)
    present = _present(run, on_record)
    return page(
        "run.html",
        visitor=visitor,
        run=run,
        revision=revision,
        decision=present,
        pulse=health.find_liveness(run, stored, visitor.project.stale_seconds, site.clock()),
        dead=stored.dead if stored and run.status == "running" else [],
        decisions=on_record,
        histories=histories,
        outcomes=judged,
        states=formatting.STATES,
        outcome_words=formatting.OUTCOMES,
        can=_can(run, present, site.clock()),
        told=formatting.told,
        changes=changes,
        metrics=metrics[:MOST_METRICS],
        recognition=metric_roles.describe_roles(run),
        sources=lambda metric: formatting.source(metric_roles.describe_roles(run)["sources"].get(metric, "")),
        choices=roles.choices(run, [item.metric for item, _ in metrics]),
        metrics_left_out=max(0, len(metrics) - MOST_METRICS),
        resumed_from=resumed_from,
        turn_step=_turn(run, present),
        roles={role["role"]: metric for metric, role in run.metrics.items()},
        standing=formatting.standing(run, present, site.clock()),
        reason=(present.verdict if present else run.verdict)["reason"],
    )


@router.get("/series.json")
def show_series(run_id: UUID, site: SiteOf, visitor: SignedIn) -> Response:
    """What the chart draws; values that are not finite are null."""
    with site.database.reading() as tx:
        run = visitor.run(tx, run_id)
        present = decisions.find_decision_of_attempt(tx, run.id, run.attempt)
        charted = {metric: role for metric, role in run.metrics.items() if role["role"] in CHARTED}
        long = {metric for metric in charted if series.is_long_series(tx, run.id, metric)}
    for metric in long:
        series.catch_up_summaries(site.database, run_id, metric)
    with site.database.reading() as tx:
        points: dict[str, list[Point]] = {metric: [] for metric in charted}
        for point in observations.load_series(tx, run.id, set(charted) - long):
            points[point.metric].append(point)
        for metric in long:
            points[metric] = outlined(series.load_buckets(tx, run.id, metric, 0, MAX_STEP, MOST_POINTS // 3), metric)
    return JSONResponse(
        {
            # A list, because a metric may be called __proto__.
            "series": [
                {"metric": metric, "role": charted[metric]["role"], **_columns(thin(points[metric], MOST_POINTS))}
                for metric in points
            ],
            "best_checkpoint": _mark(run.best_checkpoint),
            "raw_maximum": _mark(run.raw_maximum),
            "turn_step": _turn(run, present),
            "decision": {"step": present.step, "state": formatting.STATES[present.state]} if present else None,
        }
    )


@router.get("/events")
def follow_run(run_id: UUID, request: Request, site: SiteOf, visitor: SignedIn, seen: Seen) -> Response:
    """Tell whenever the run or a decision on it has changed."""
    with site.database.reading() as tx:
        visitor.run(tx, run_id)
    return follow(request, site, seen, lambda tx: runs.read_run_revision(tx, visitor.project.id, run_id))


def _present(run: Run, on_record: list[Decision]) -> Decision | None:
    return next((decision for decision in on_record if decision.attempt == run.attempt), None)


def _can(run: Run, decision: Decision | None, now: datetime) -> dict[str, bool]:
    """What may be done about the run as it stands."""
    state = DecisionState(decision.state) if decision else None
    stopping = decision is not None and decision.stops(now)
    return {
        "veto": state is DecisionState.ON_HOLD or (state is DecisionState.PENDING and not stopping),
        "release": state is DecisionState.ON_HOLD,
        "undo": stopping,
        "stop": run.status in ("running", "lost") and (state is None or DecisionState.REQUESTED in NEXT_STATES[state]),
        "label": run.last_step is not None,
    }


def _turn(run: Run, decision: Decision | None) -> int | None:
    """Where the turn is believed to be: with hindsight, or as the decision says, or as the present verdict does."""
    if run.turn is not None:
        return int(run.turn["step"])
    turn: int | None = (decision.verdict if decision else run.verdict)["turn_step"]
    return turn


def _by_role(run: Run, metrics: list[LatestObservation]) -> list[tuple[LatestObservation, dict[str, str] | None]]:
    """The metrics with their roles, the watched ones first."""
    order = list(run.metrics)
    placed = [(item, run.metrics.get(item.metric)) for item in metrics]
    return sorted(placed, key=lambda pair: order.index(pair[0].metric) if pair[1] else len(order))


def _columns(points: list[Point]) -> dict[str, list[Any]]:
    return {
        "steps": [point.step for point in points],
        "values": [point.value if math.isfinite(point.value) else None for point in points],
        "stderrs": [point.stderr if point.stderr is None or math.isfinite(point.stderr) else None for point in points],
    }


def _mark(best: dict[str, Any] | None) -> dict[str, Any] | None:
    return {"step": best["step"], "score": best["score"]} if best else None
