"""The list of runs: searched, filtered, ordered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Literal
from uuid import UUID

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from evalstop_service.clock import in_utc
from evalstop_service.errors import NotFound
from evalstop_service.rules.decision_lifecycle import Mode
from evalstop_service.rules.liveness import Liveness
from evalstop_service.rules.metric_health import MetricFault
from evalstop_service.rules.run_results import Call
from evalstop_service.rules.statuses import RunStatus
from evalstop_service.runs import health, watched_metrics
from evalstop_service.store import decisions, policies, run_health, runs, sparklines
from evalstop_service.store.database import Transaction
from evalstop_service.store.decisions import Decision
from evalstop_service.store.observations import MAX_STEP
from evalstop_service.store.runs import Run, RunFilter
from evalstop_service.web.dashboard import formatting, forms, sparkline
from evalstop_service.web.dashboard.live_updates import SeenRevision, stream_changes
from evalstop_service.web.dashboard.responses import PageRoute, make_link, render_page
from evalstop_service.web.dashboard.sparkline import Sparkline
from evalstop_service.web.dashboard.visitor import SignedIn, SiteOf

router = APIRouter(route_class=PageRoute)

PAGE = 50
STATUSES = tuple(RunStatus)

_SNIPPET = """\
from evalstop_client import Run

with Run(url="URL", key="esk_...", name="my-first-run") as run:
    for step in range(total_steps):
        reward, kl = train_one_step()
        run.log({"proxy": reward, "kl": kl}, step=step)
        if step % 20 == 0:
            run.log({"eval": evaluate()}, step=step)
            run.checkpoint(save_model(step), step=step)
        if run.should_stop:
            break"""


@dataclass(frozen=True)
class Row:
    """A run in the list."""

    run: Run
    decision: Decision | None
    sparkline: Sparkline | None
    health: Liveness
    metric_faults: Sequence[MetricFault]


class Filters(BaseModel):
    """The filters in the query string; an empty one is off."""

    model_config = ConfigDict(extra="ignore")

    name: str = ""
    status: Literal[""] | RunStatus = ""
    verdict: Literal[""] | Call = ""
    policy: Annotated[str, Field(max_length=100)] = ""
    mode: Literal[""] | Mode = ""
    job_kind: Annotated[str, Field(max_length=256)] = ""
    order: Literal["", "updated", "step"] = ""
    cursor: UUID | Literal[""] = ""
    place: Annotated[str, Field(max_length=40)] = ""

    def to_query(self) -> RunFilter:
        """The filters as the store takes them; raises NotFound for an invalid cursor."""
        order = self.order or "newest"
        return RunFilter(
            name=forms.clean_text(self.name) or None,
            status=self.status or None,
            verdict=self.verdict or None,
            mode=self.mode or None,
            policy=forms.remove_control_characters(self.policy) or None,
            job_kind=forms.remove_control_characters(self.job_kind) or None,
            order=order,
            before=self.cursor or None,
            place=_parse_place(order, self.place),
        )

    def link(self, path: str = "/runs", **changes: str) -> str:
        """The address of the list with some filters changed."""
        return make_link(path, self.model_dump() | changes)


@router.get("/runs")
def show_runs(request: Request, site: SiteOf, visitor: SignedIn, filters: Annotated[Filters, Query()]) -> Response:
    """The project's runs, newest first by default."""
    wanted = filters.to_query()
    with site.database.reading() as tx:
        # Read first, so that what follows is never older than the revision.
        revision = runs.read_list_revision(tx, visitor.project.id, wanted, PAGE)
        page_of_runs = runs.list_runs(tx, visitor.project.id, wanted, PAGE + 1)
        rows = _load_rows(tx, page_of_runs[:PAGE], visitor.project.stale_seconds, site.clock())
        names = sorted({policy.name for policy in policies.list_policies(tx, visitor.project.id)})
    first = {"cursor": "", "place": ""}
    last = rows[-1].run if len(page_of_runs) > PAGE else None
    return render_page(
        "runs.html",
        visitor=visitor,
        rows=rows,
        states=formatting.STATES,
        filters=filters,
        policies=[(name, name) for name in names],
        kinds=sorted({row.run.labels["job_kind"] for row in rows if "job_kind" in row.run.labels}),
        statuses={choice: filters.link(status=choice, **first) for choice in ("", *STATUSES)},
        filtered=filters != Filters(order=filters.order),
        bounded=wanted.bounded,
        next_page=filters.link(cursor=str(last.id), place=_format_place(wanted.order, last)) if last else None,
        first_page=filters.link(**first) if filters.cursor else None,
        events=filters.link("/runs/events"),
        revision=revision,
        snippet=_SNIPPET.replace("URL", f"{request.url.scheme}://{request.url.netloc}"),
    )


@router.get("/runs/events")
def follow_runs(
    request: Request, site: SiteOf, visitor: SignedIn, filters: Annotated[Filters, Query()], seen: SeenRevision
) -> Response:
    """Send an event whenever the list has changed."""
    wanted = filters.to_query()
    return stream_changes(request, site, seen, lambda tx: runs.read_list_revision(tx, visitor.project.id, wanted, PAGE))


def _load_rows(tx: Transaction, page_of_runs: list[Run], stale_seconds: float, now: datetime) -> list[Row]:
    decided = decisions.load_decisions(tx, [run.id for run in page_of_runs])
    evals = {run.id: metric for run in page_of_runs if (metric := watched_metrics.find_eval_metric(run)) is not None}
    stored = run_health.load_health(tx, [run.id for run in page_of_runs])
    drawn = sparklines.load_segments(tx, evals, sparkline.STRETCHES)
    return [
        Row(
            run,
            decision := decided.get(run.id),
            sparkline.draw_sparkline(drawn.get(run.id, ()), run.best_checkpoint, decision.step if decision else None),
            health.find_liveness(run, run_report := stored.get(run.id), stale_seconds, now),
            run_report.metric_faults if run_report and run.status == RunStatus.RUNNING else [],
        )
        for run in page_of_runs
    ]


def _format_place(order: str, run: Run) -> str:
    """The place of a run in the order, as the address of the next page has it."""
    if order == "updated":
        return run.updated_at.isoformat()
    return str(-1 if run.last_step is None else run.last_step) if order == "step" else ""


def _parse_place(order: str, text: str) -> datetime | int | None:
    if not text or order == "newest":
        return None
    try:
        if order == "updated":
            return in_utc(datetime.fromisoformat(text))
        step = int(text)
    except ValueError as error:
        raise NotFound from error
    if not -1 <= step <= MAX_STEP:
        raise NotFound
    return step
