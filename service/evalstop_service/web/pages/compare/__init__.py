"""Compares two to ten runs, or the newest of a group, in shared charts."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal
from uuid import UUID

from evalstop_detectors import MetricRole
from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, Field

from evalstop_service.domain.fields import Name
from evalstop_service.domain.run import BestCheckpoint, RawMaximum
from evalstop_service.errors import Invalid
from evalstop_service.runs import watched_metrics
from evalstop_service.store import decisions, mlflow, run_lists
from evalstop_service.store.database import Transaction
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.run_lists import RunFilter
from evalstop_service.store.runs import Run
from evalstop_service.store.series import Point
from evalstop_service.web.pages import charts
from evalstop_service.web.pages.charts import ChartedSeries
from evalstop_service.web.pages.responses import PageRoute, make_link, render_page, send_json
from evalstop_service.web.pages.visitor import SignedIn, SiteOf, Visitor

router = APIRouter(prefix="/runs/compare", route_class=PageRoute)

LEAST_RUNS, MOST_RUNS = 2, 10
MOST_POINTS = 1000
"""Per line; there are up to thirty lines."""

MOST_FIELDS = 50


class Comparison(BaseModel):
    """The query of the page: the runs or their group, and how they are drawn. A script reads its zoom."""

    run: list[UUID] = []
    group: Name | None = None
    x: Literal["step", "kl", "sqrt_kl"] = "step"
    smoothing: Annotated[float, Field(ge=0, le=0.95)] = 0
    hidden: list[UUID] = []


ComparisonQuery = Annotated[Comparison, Query()]


@dataclass(frozen=True)
class ComparedRun:
    """A row of the table. `fields`: the run's values of the differing fields, in the order of the columns."""

    run: Run
    best: BestCheckpoint | RawMaximum | None
    last_eval: Point | None
    turn: tuple[str, int] | None
    fields: Sequence[str | None]


@router.get("")
def show_comparison(request: Request, site: SiteOf, visitor: SignedIn, comparison: ComparisonQuery) -> Response:
    """The page: a table of the runs and their differing fields, and the frame of the charts."""
    with site.database.reading() as tx:
        runs = _load_runs(tx, visitor, comparison)
        outlines = charts.load_eval_outlines(tx, runs, charts.CURVE_POINTS // len(runs))
        differing, rows = _load_rows(tx, runs, outlines)
    frame, lines = charts.draw_evals(outlines)
    return render_page(
        "compare.html",
        visitor=visitor,
        comparison=comparison,
        rows=rows,
        frame=frame,
        lines=lines,
        differing=differing[:MOST_FIELDS],
        fields_left_out=max(0, len(differing) - MOST_FIELDS),
        series=make_link("/runs/compare/series.json", {"run": [str(run.id) for run in runs]}),
        group_link=make_link("/runs", {"group": comparison.group}),
        most=MOST_RUNS,
        here_url=str(request.url),
    )


@router.get("/series.json")
def show_series(site: SiteOf, visitor: SignedIn, comparison: ComparisonQuery) -> Response:
    """The data of the charts, in the order of the runs; values that are not finite are null.

    Each observation has its step and the last KL up to it.
    """
    with site.database.reading() as tx:
        runs = _load_runs(tx, visitor, comparison)
    charted = charts.load_charted(site.database, runs, MOST_POINTS)
    return send_json({"runs": [_encode_run(run, charted[run.id]) for run in runs]})


def _load_runs(tx: Transaction, visitor: Visitor, comparison: Comparison) -> list[Run]:
    """The runs to compare; raises NotFound and, with too few or too many of them, Invalid."""
    ids = list(dict.fromkeys(comparison.run))
    if not ids and comparison.group is not None:
        runs = run_lists.list_runs(tx, visitor.project.id, RunFilter(group=comparison.group), MOST_RUNS)
        if len(runs) < LEAST_RUNS:
            raise Invalid("This group has fewer than two runs: there is nothing to compare.")
        return runs
    if not LEAST_RUNS <= len(ids) <= MOST_RUNS:
        raise Invalid(f"Choose {LEAST_RUNS} to {MOST_RUNS} runs to compare, not {len(ids)}.")
    return [visitor.load_run(tx, run_id) for run_id in ids]


def _load_rows(
    tx: Transaction, runs: Sequence[Run], outlines: Mapping[UUID, Sequence[Point]]
) -> tuple[list[tuple[str, str]], list[ComparedRun]]:
    """The differing fields, as kinds and names, in order of first appearance, and the rows of the table."""
    ids = [run.id for run in runs]
    decided = decisions.load_decisions(tx, ids)
    params = mlflow.load_mlflow_runs(tx, ids)
    fields = [dict(_list_fields(run, params[run.id].params)) for run in runs]
    every = dict.fromkeys(field for run_fields in fields for field in run_fields)
    differing = [field for field in every if len({run_fields.get(field) for run_fields in fields}) > 1]
    rows = []
    for run, run_fields in zip(runs, fields, strict=True):
        turn = charts.find_turn(run, decided.get(run.id))
        field_values = [run_fields.get(field) for field in differing[:MOST_FIELDS]]
        best = run.best_checkpoint or run.raw_maximum
        last_eval = outlines[run.id][-1] if run.id in outlines else None
        rows.append(ComparedRun(run, best, last_eval, turn, field_values))
    return differing, rows


def _list_fields(run: Run, params: Mapping[str, str]) -> Iterator[tuple[tuple[str, str], str]]:
    """The comparable fields of a run: kind and name, and the value."""
    eval_metric = watched_metrics.find_eval_metric(run)
    yield ("", "policy"), f"{run.policy_name} v{run.policy_version}, {run.mode}"
    yield ("", "eval metric"), eval_metric or "none"
    for kind, named_values in (("label", run.labels), ("param", params)):
        for name, value in named_values.items():
            yield (kind, name), str(value)


def _encode_run(run: Run, charted: Sequence[ChartedSeries]) -> dict[str, Any]:
    by_role = {item.role: item for item in reversed(charted)}  # the first of several with one role
    kl = by_role[MetricRole.KL].values if MetricRole.KL in by_role else []
    lines = [
        {
            "role": role,
            "steps": _list_steps(item.drawn),
            "kl": _find_kl(kl, _list_steps(item.drawn)),
            "values": [point.value for point in item.drawn],
        }
        for role, item in by_role.items()
    ]
    best = run.best_checkpoint
    marked = {"step": best.step, "kl": _find_kl(kl, [best.step])[0], "score": best.score} if best else None
    return {"id": str(run.id), "lines": lines, "best": marked}


def _find_kl(kl: Sequence[PostedObservation], steps: Sequence[int]) -> list[float | None]:
    """The last KL up to each step."""
    kl_steps = _list_steps(kl)
    positions = [bisect_right(kl_steps, step) - 1 for step in steps]
    return [None if position < 0 else kl[position].value for position in positions]


def _list_steps(points: Sequence[PostedObservation]) -> list[int]:
    return [point.step for point in points]
