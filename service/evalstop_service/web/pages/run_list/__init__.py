"""The list of runs, with search, filters and sorting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

from fastapi import APIRouter, Query, Request, Response
from pydantic import Field, model_validator

from evalstop_service.domain.health import Liveness, MetricFault
from evalstop_service.domain.run import RunDescription
from evalstop_service.domain.statuses import RunStatus
from evalstop_service.runs import health
from evalstop_service.store import decisions, policies, run_details, run_lists
from evalstop_service.store.database import Transaction
from evalstop_service.store.decisions import Decision
from evalstop_service.store.run_lists import RunFilter
from evalstop_service.store.runs import Run
from evalstop_service.web.api.list_filters import RunQuery
from evalstop_service.web.pages import charts, formatting, forms
from evalstop_service.web.pages.charts import Sparkline
from evalstop_service.web.pages.compare import LEAST_RUNS, MOST_RUNS
from evalstop_service.web.pages.responses import PageRoute, make_link, render_page
from evalstop_service.web.pages.visitor import SignedIn, SiteOf

router = APIRouter(route_class=PageRoute)

PAGE = 50
STATUSES = tuple(RunStatus)


@dataclass(frozen=True)
class Row:
    """A run in the list."""

    run: Run
    decision: Decision | None
    sparkline: Sparkline | None
    health: Liveness
    metric_faults: Sequence[MetricFault]
    description: RunDescription


class Filters(RunQuery):
    """The filters in the query string; an empty one is off."""

    order: Literal["newest", "updated", "step"] = "newest"
    column: list[Literal["policy", "owner", "group", "tags", "opened"]] = Field([], max_length=5)
    cursor: UUID | None = None
    skip: Annotated[int, Field(ge=0, le=run_lists.SEARCHED)] = 0

    @model_validator(mode="before")
    @classmethod
    def _leave_out_empty(cls, fields: Any) -> Any:
        """Convert values of form fields: empty ones are omitted, dates become times."""
        cleaned: dict[str, Any] = {}
        for name, value in dict(fields).items():
            texts = [
                clean for item in (value if isinstance(value, list) else [value]) if (clean := forms.clean_text(item))
            ]
            cleaned[name] = texts if isinstance(value, list) else "".join(texts)
            if name in ("since", "until") and len(cleaned[name]) == len("2026-01-01"):
                cleaned[name] += "T00:00Z"
        return {name: value for name, value in cleaned.items() if value}

    def to_page(self) -> RunFilter:
        """The filter of this page of the list."""
        return replace(self.to_filter(self.cursor), order=self.order, skipped=self.skip)

    def list_values(self) -> list[tuple[str, str]]:
        """The active filters, as hidden fields of a form."""
        active = self.model_dump(mode="json", exclude_defaults=True, exclude={"cursor", "skip"})
        return [
            (name, item) for name, value in active.items() for item in (value if isinstance(value, list) else [value])
        ]

    def link(self, path: str = "/runs", **changes: str) -> str:
        """The address of the list with some filters changed."""
        return make_link(path, self.model_dump(mode="json", exclude_defaults=True) | changes)


@router.get("/runs")
def show_runs(request: Request, site: SiteOf, visitor: SignedIn, filters: Annotated[Filters, Query()]) -> Response:
    """The project's runs, newest first by default."""
    run_filter = filters.to_page()
    with site.database.reading() as tx:
        # Read first, so that what follows is never older than the revision.
        revision = run_lists.read_list_revision(tx, visitor.project.id, run_filter, PAGE)
        if visitor.seen == revision:
            return Response(status_code=204)
        page_of_runs = run_lists.list_runs(tx, visitor.project.id, run_filter, PAGE + 1)
        rows = _load_rows(tx, page_of_runs[:PAGE], visitor.project.stale_seconds, site.clock())
        names = sorted(policies.load_latest_versions(tx, visitor.project.id))
    first = {"cursor": "", "skip": ""}
    following = (
        {"cursor": str(rows[-1].run.id)} if filters.order == "newest" and rows else {"skip": f"{filters.skip + PAGE}"}
    )
    return render_page(
        "runs.html",
        visitor=visitor,
        rows=rows,
        name_state=formatting.name_state,
        filters=filters,
        policies=names,
        hidden=filters.list_values(),
        least_compared=LEAST_RUNS,
        most_compared=MOST_RUNS,
        compare_group=make_link("/runs/compare", {"group": filters.group}),
        kinds=sorted({row.run.labels["job_kind"] for row in rows if "job_kind" in row.run.labels}),
        statuses={choice: filters.link(status=choice, **first) for choice in ("", *STATUSES)},
        filtered=filters != Filters(order=filters.order, column=filters.column),
        bounded=run_filter.bounded,
        next_page=filters.link(**following) if len(page_of_runs) > PAGE else None,
        first_page=filters.link(**first) if filters.cursor or filters.skip else None,
        revision=revision,
        url=f"{request.url.scheme}://{request.url.netloc}",
        mistake=formatting.suggest_name("policy", filters.policy, names),
    )


def _load_rows(tx: Transaction, page_of_runs: list[Run], stale_seconds: float, now: datetime) -> list[Row]:
    decided = decisions.load_decisions(tx, [run.id for run in page_of_runs])
    stored = run_details.load_health(tx, [run.id for run in page_of_runs])
    descriptions = run_details.load_descriptions(tx, [run.id for run in page_of_runs])
    sparklines = charts.draw_sparklines(tx, page_of_runs, decided)
    return [
        Row(
            run,
            decided.get(run.id),
            sparklines[run.id],
            health.find_liveness(run, run_report := stored.get(run.id), stale_seconds, now),
            run_report.metric_faults if run_report and run.status == RunStatus.RUNNING else [],
            descriptions[run.id],
        )
        for run in page_of_runs
    ]
