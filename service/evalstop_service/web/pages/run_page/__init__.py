"""The page of one run: its state, charts, decisions with their histories, and metrics; its observations as CSV."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import quote
from uuid import UUID

from fastapi import APIRouter, Response
from fastapi.responses import StreamingResponse

from evalstop_service.domain.decision_commands import allowed_actions
from evalstop_service.domain.decision_lifecycle import AWAITING_CONFIRMATION, Action, DecisionState
from evalstop_service.domain.event_types import NOTICES
from evalstop_service.domain.health import LOST_TIMES, stale_after_seconds
from evalstop_service.domain.run import COMBINED_METRIC, MetricFields
from evalstop_service.domain.statuses import OPEN, UNENDED, RunStatus
from evalstop_service.ingest import list_calls
from evalstop_service.runs import health, metric_roles, watched_metrics
from evalstop_service.store import (
    cases,
    decisions,
    mlflow,
    observations,
    policies,
    proposals,
    run_details,
    run_lists,
    runs,
    series,
)
from evalstop_service.store.decisions import Decision, DecisionChange
from evalstop_service.store.observations import LatestObservation, PostedObservation
from evalstop_service.store.queue import outbox
from evalstop_service.store.runs import Run
from evalstop_service.web.limits import in_thread
from evalstop_service.web.pages import charts, formatting
from evalstop_service.web.pages.charts import SPARK_POINTS, Frame, list_charted
from evalstop_service.web.pages.responses import PageRoute, make_link, render_page, send_json
from evalstop_service.web.pages.run_page.analysis import explain_raw_maximum
from evalstop_service.web.pages.run_page.run_actions import HINTS
from evalstop_service.web.pages.visitor import SignedIn, SiteOf

router = APIRouter(prefix="/runs/{run_id}", route_class=PageRoute)

MOST_POINTS = 2000
MOST_METRICS = 12
"""Maximum number of metrics in the table; those not in the main chart have small charts."""

MOST_CHOICES = 500
"""Maximum number of metrics to choose from for a role."""

MOST_VERDICTS = 20

_CUT_SHORT = {RunStatus.STOPPED, RunStatus.FAILED}


@router.get("")
def show_run(run_id: UUID, site: SiteOf, visitor: SignedIn) -> Response:
    """A run with its current decision and those of its earlier attempts."""
    with site.database.reading() as tx:
        # Read first, so that what follows is never older than the revision.
        revision = run_lists.read_run_revision(tx, visitor.project.id, run_id)
        if visitor.seen == revision:
            return Response(status_code=204)
        run = visitor.load_run(tx, run_id)
        stored = run_details.load_health(tx, [run.id]).get(run.id)
        on_record = decisions.list_decisions(tx, run.project_id, run_id=run.id)
        histories = decisions.load_changes(tx, on_record)
        judged = cases.load_outcomes(tx, [(run.id, decision.attempt) for decision in on_record])
        changes = run_details.list_verdicts(tx, run.id, limit=MOST_VERDICTS)
        metrics = _order_by_role(run, observations.list_latest(tx, run))
        requests = run_details.list_requests(tx, run.id)
        notices = outbox.list_data(tx, run.id, NOTICES, limit=MOST_VERDICTS)
        subjects = {str(run.id), *(str(decision.id) for decision in on_record)}
        proposed = proposals.list_open(tx, run.project_id, site.clock(), subjects)
        calls = list_calls(tx, run)
        versions = policies.load_latest_versions(tx, visitor.project.id)
        latest = [f"{name}@{version}" for name, version in sorted(versions.items())]
        curves = charts.load_curves(tx, run)
        others = runs.list_spared_runs(tx, run, Action.STOP) if run.status in OPEN else []
        current = decisions.find_decision_of_attempt(tx, run.id, run.attempt)
        case = cases.find_case(tx, run.id, run.attempt)
        remark = explain_raw_maximum(tx, run)
        resumed_from = runs.get_resumed_step(tx, run)
        params = mlflow.load_mlflow_runs(tx, [run.id])[run.id].params
        description = run_details.load_descriptions(tx, [run.id])[run.id]
    stale_seconds, cadence_seconds = visitor.project.stale_seconds, stored.cadence_seconds if stored else None
    return render_page(
        "run.html",
        visitor=visitor,
        run=run,
        revision=revision,
        decision=current,
        liveness=health.find_liveness(run, stored, stale_seconds, site.clock()),
        silent_seconds=(site.clock() - health.last_report_at(run, stored)).total_seconds(),
        cadence_seconds=cadence_seconds,
        lost_after_seconds=stale_after_seconds(stale_seconds, cadence_seconds) * (1 + LOST_TIMES),
        job_runs=[other.name for other in others],
        metric_faults=stored.metric_faults if stored and run.status == RunStatus.RUNNING else [],
        decisions=on_record,
        proposals=proposed,
        states={decision.id: list_states(decision, histories[decision.id]) for decision in on_record},
        outcomes={decision.id: judged.get((run.id, decision.attempt)) for decision in on_record},
        name_state=formatting.name_state,
        can=allowed_actions(current, site.clock(), run.heard_at),
        changes=changes,
        calls=calls,
        silent=[call.detector for call in calls if not (call.observes or call.evidence or call.step)],
        eval_requests=requests[::-1],
        notices=notices,
        curves=curves,
        metrics=metrics[:MOST_METRICS],
        paired_metric=watched_metrics.PAIRED_METRIC,
        recognition=metric_roles.describe_roles(run),
        sources=lambda metric: _describe_role_source(run, metric),
        hints=HINTS,
        # With a role but no value yet, too.
        choices=sorted({*run.metrics, *(item.metric for item, _ in metrics)})[:MOST_CHOICES],
        has_others=not charts.list_charted(run).keys() >= {item.metric for item, _ in metrics},
        # Its own version first.
        tried=list(dict.fromkeys([f"{run.policy_name}@{run.policy_version}", *latest])),
        metrics_left_out=max(0, len(metrics) - MOST_METRICS),
        resumed_from=resumed_from,
        params=params,
        description=description,
        link=make_link,
        turns=charts.list_turns(run, current),
        case=case,
        remark=remark,
        misnamed=formatting.explain_misnamed(run.metrics, [item.metric for item, _ in metrics]),
        roles={role["role"]: metric for metric, role in run.metrics.items()},
        summary=formatting.describe_run(run, current, site.clock()),
        reason=(current or run).verdict.reason,
    )


@router.get("/series.json")
def show_series(run_id: UUID, site: SiteOf, visitor: SignedIn) -> Response:
    """The data of the chart; values that are not finite are null."""
    with site.database.reading() as tx:
        run = visitor.load_run(tx, run_id)
        decision = decisions.find_decision_of_attempt(tx, run.id, run.attempt)
        notes = run_details.load_descriptions(tx, [run.id])[run.id].step_notes
    charted = charts.load_charted(site.database, [run], MOST_POINTS)[run.id]
    return send_json(
        {
            # A list, because a metric may be named __proto__.
            "series": [{"metric": item.metric, "role": item.role, **_to_columns(item.drawn)} for item in charted],
            "best_checkpoint": run.best_checkpoint,
            "raw_maximum": run.raw_maximum,
            "turns": [{"name": name, "step": step} for name, step in charts.list_turns(run, decision).items()],
            "last_step": run.last_step,
            "planned_end": run.total_steps if run.length_known and run.status in _CUT_SHORT | UNENDED else None,
            "ended": run.status not in UNENDED,
            "eval_changes": [{"step": change.step, "reason": change.reason} for change in run.eval_changes],
            "notes": [{"step": note.step, "text": note.text} for note in notes],
            "decision": decision
            and {"step": decision.step, "state": formatting.name_state(decision.state, decision.action)},
        }
    )


_ROLE_SOURCES = {"names": "from its name", "person": "set by a person", "default": "default"}


def _describe_role_source(run: Run, metric: str) -> str:
    if metric == COMBINED_METRIC and metric not in run.metrics:
        return "the weighted mean of the evals"
    source = metric_roles.describe_roles(run).sources.get(metric, "")
    return source if source.startswith("preset ") else _ROLE_SOURCES.get(source, "set by the trainer")


def _order_by_role(run: Run, metrics: list[LatestObservation]) -> list[tuple[LatestObservation, MetricFields | None]]:
    """The metrics with their roles, watched metrics first."""
    roles = watched_metrics.list_watched(run)
    order = list(roles)
    with_roles = [(item, roles.get(item.metric)) for item in metrics]
    return sorted(with_roles, key=lambda pair: order.index(pair[0].metric) if pair[1] else len(order))


def _to_columns(points: Sequence[PostedObservation]) -> dict[str, list[Any]]:
    return {
        "steps": [point.step for point in points],
        "values": [point.value for point in points],
        "stderrs": [point.stderr for point in points],
    }


MOST_CHARTS = 48
"""Maximum number of small charts."""


@router.get("/metric-charts")
def show_metric_charts(run_id: UUID, site: SiteOf, visitor: SignedIn) -> Response:
    """The charts of the metrics that the main chart leaves out, by name."""
    with site.database.reading() as tx:
        run = visitor.load_run(tx, run_id)
        charted = list_charted(run)
        others = [item for item in observations.list_latest(tx, run) if item.metric not in charted]
        shown = [(run.id, item.metric) for item in others[:MOST_CHARTS]]
        outlines = series.load_outlines(tx, shown, SPARK_POINTS)
    drawn = []
    for item in others[:MOST_CHARTS]:
        frame = Frame.around(found) if (found := outlines.get((run.id, item.metric))) else None
        drawn.append((item, frame, frame.line(found) if frame and found else ""))
    left = max(0, len(others) - MOST_CHARTS)
    return render_page("metric_charts.html", visitor=visitor, run=run, charts=drawn, left=left)


@dataclass(frozen=True)
class PastState:
    """A state of a decision. `seconds`: how long it lasted; None: it is the last, which ends at `until` if known."""

    name: str
    change: DecisionChange
    seconds: float | None
    until: datetime | None
    details: dict[str, Any]


def list_states(decision: Decision, changes: Sequence[DecisionChange]) -> list[PastState]:
    """The states of a decision, first to last."""
    due = {DecisionState.PENDING: decision.due_at} | dict.fromkeys(AWAITING_CONFIRMATION, decision.deadline_at)
    listed = []
    for change, following in zip(changes, [*changes[1:], None], strict=True):
        pends = change.state is DecisionState.PENDING
        name = "veto window" if pends else formatting.name_state(change.state, decision.action)
        seconds = None if following is None else (following.at - change.at).total_seconds()
        until = due.get(change.state) if following is None else None
        listed.append(PastState(name, change, seconds, until, formatting.list_change_details(change)))
    return listed


EXPORT_BATCH = 5_000
COLUMNS = ("metric", "step", "value", "stderr", "observed_at", "received_at", "attempt", "superseded_by")

_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")
_NOT_FINITE = {None: "NaN", math.inf: "Infinity", -math.inf: "-Infinity"}


@router.get("/export.csv")
def export_csv(run_id: UUID, site: SiteOf, visitor: SignedIn) -> Response:
    """All observations of a run as CSV. Names that a spreadsheet would run as a formula get a leading apostrophe."""
    with site.database.reading() as tx:
        run = visitor.load_run(tx, run_id)

    def write_csv() -> Iterator[str]:
        yield ",".join(COLUMNS) + "\r\n"
        after: tuple[str, int, int] | None = None
        while True:
            with site.database.reading() as tx:  # a short one, so that a slow client does not hold it open
                rows = observations.list_exported(tx, run.id, after=after, limit=EXPORT_BATCH)
            yield _format_rows(rows)
            if len(rows) < EXPORT_BATCH:
                return
            after = (rows[-1][0], rows[-1][1], rows[-1][-1] or 0)

    async def send() -> AsyncIterator[str]:
        # Starlette would take any free thread for each part; a lane gives a sender only its share.
        parts = write_csv()
        while (part := await in_thread(next)(parts, None)) is not None:
            yield part

    headers = {"Content-Disposition": f"attachment; filename*=UTF-8''{quote(f'{run.name[:80]}.csv', safe='')}"}
    return StreamingResponse(send(), media_type="text/csv; charset=utf-8", headers=headers)


def _format_rows(rows: Sequence[Sequence[Any]]) -> str:
    """Rows as CSV. Only names need quotes; the csv module looks for them everywhere, and takes twice as long."""
    names = {metric: _quote_name(metric) for metric in {row[0] for row in rows}}
    lines = [
        f"{names[metric]},{step},{_NOT_FINITE.get(value) or repr(value)},"
        f"{'' if stderr is None else _NOT_FINITE.get(stderr) or repr(stderr)},"
        f"{observed_at or ''},{received_at},{attempt},{superseded_by or ''}\r\n"
        for metric, step, value, stderr, observed_at, received_at, attempt, superseded_by in rows
    ]
    return "".join(lines)


def _quote_name(metric: str) -> str:
    """A name, with an apostrophe before it if a spreadsheet would run it as a formula."""
    name = f"'{metric}" if metric.startswith(_FORMULA_STARTS) else metric
    return '"{}"'.format(name.replace('"', '""')) if set(name) & set(',"\r\n') else name
