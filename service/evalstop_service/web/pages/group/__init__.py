"""The page of a group of runs: their curves, the rule that compares them, what they descend from, and its decisions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated
from uuid import UUID

import msgspec
import numpy as np
from fastapi import APIRouter, Path, Query, Response

from evalstop_service.decisions import group_rules
from evalstop_service.decisions.group_rules import GroupedRun, LoadedGroup
from evalstop_service.domain.decision_lifecycle import Action, DecisionState
from evalstop_service.domain.statuses import UNENDED
from evalstop_service.runs.watched_metrics import find_eval_sign
from evalstop_service.store import groups, run_lists
from evalstop_service.store.database import Transaction
from evalstop_service.store.decisions import Decision
from evalstop_service.store.groups import Copy
from evalstop_service.store.run_lists import RunFilter
from evalstop_service.store.runs import Run
from evalstop_service.store.series import Point
from evalstop_service.web.pages import formatting
from evalstop_service.web.pages.charts import CURVE_HEIGHT, CURVE_WIDTH, Frame
from evalstop_service.web.pages.compare import LEAST_RUNS, MOST_RUNS
from evalstop_service.web.pages.responses import PageRoute, make_link, render_page, send_json
from evalstop_service.web.pages.visitor import SignedIn, SiteOf, Visitor

router = APIRouter(route_class=PageRoute)

MOST_POINTS, MOST_PREVIEWED, FEWEST_POINTS = 20_000, 4_000, 20
"""Evals that are drawn: of all runs together, before the script has arrived, and of a run at least."""

MOST_LANES = 200
"""Lineages that are drawn, of the first runs."""

_COPIED = (Action.EXPLOIT, DecisionState.CONFIRMED)

Hyperparameters = Mapping[str, float | str]


@dataclass(frozen=True)
class Stage:
    """The steps of a lineage that one run made with the same hyperparameters."""

    run_id: UUID
    run: str
    from_step: int
    to_step: int
    hyperparameters: Hyperparameters


@dataclass(frozen=True)
class Member:
    """A run of the group. `place`: in the order of opening, from 1; `lineage`: what it descends from, oldest first."""

    grouped: GroupedRun
    place: int
    lineage: Sequence[Stage]
    decision: Decision | None


@router.get("/groups/{name:path}")
def show_group(name: Annotated[str, Path(max_length=256)], site: SiteOf, visitor: SignedIn) -> Response:
    """A group, with or without a rule."""
    with site.database.reading() as tx:
        # Read first, so that what follows is never older than the revision.
        revision = _read_revision(tx, visitor, name)
        if visitor.seen == revision:
            return Response(status_code=204)
        loaded = group_rules.load_group(tx, visitor.project.id, name)
    rows = _rank_members(loaded)
    best = rows[0].lineage if rows and rows[0].grouped.last_eval is not None else []
    best_runs = list(dict.fromkeys(stage.run_id for stage in best))
    curves = {run_id: _split_curve(item, MOST_PREVIEWED // len(loaded.runs)) for run_id, item in loaded.runs.items()}
    points = sorted(point for pieces in curves.values() for piece in pieces for point in piece)
    # A copy that was made is in the list of copies.
    known = [item for item in loaded.decided if item.run_id in loaded.runs and (item.action, item.state) != _COPIED]
    copies = sorted(_list_copies(loaded.runs), key=lambda item: item[1].at, reverse=True)
    last_step = max((stage.to_step for row in rows for stage in row.lineage), default=0)
    return render_page(
        "group.html",
        visitor=visitor,
        name=name,
        group=loaded.group,
        rule=loaded.rule,
        document=formatting.format_json(loaded.group.rule) if loaded.group else "",
        revision=revision,
        rows=rows,
        frame=replace(Frame.around(points), width=CURVE_WIDTH, height=CURVE_HEIGHT, margin=0) if points else None,
        curves=curves,
        lanes=_draw_lanes(loaded, best, last_step) if copies else [],
        last_step=last_step,
        copies=copies,
        best=best,
        schedule=msgspec.json.format(msgspec.json.encode(best), indent=2).decode(),
        decided=[(item, None if item.exploit else _doubt_stop(item, loaded.runs)) for item in known],
        name_state=formatting.name_state,
        link=make_link,
        compare_lineage=LEAST_RUNS <= len(best_runs) <= MOST_RUNS and make_link("/runs/compare", {"run": best_runs}),
    )


@router.get("/group/series.json")
def show_series(group: Annotated[str, Query(max_length=256)], site: SiteOf, visitor: SignedIn) -> Response:
    """The curve of each run, in pieces between changes of its eval, and its lineage."""
    with site.database.reading() as tx:
        loaded = group_rules.load_group(tx, visitor.project.id, group)
    most = MOST_POINTS // max(1, len(loaded.runs))
    documents = [
        {
            "id": row.grouped.run.id,
            "name": row.grouped.run.name,
            "place": row.place,
            "ended": row.grouped.run.status not in UNENDED,
            "pieces": [[point[:2] for point in piece] for piece in _split_curve(row.grouped, most)],
            "lineage": row.lineage,
        }
        for row in _rank_members(loaded)
    ]
    return send_json({"runs": documents, "hyperparameters": list(loaded.rule.hyperparameters) if loaded.rule else []})


def _read_revision(tx: Transaction, visitor: Visitor, name: str) -> str:
    group = groups.find_group(tx, visitor.project.id, name)
    listed = run_lists.read_list_revision(tx, visitor.project.id, RunFilter(group=name), group_rules.MOST_MEMBERS)
    return f"{listed}-{group.created_at.timestamp() if group else 0}"


def _rank_members(loaded: LoadedGroup) -> list[Member]:
    """The runs by their last eval, the best first; those without one last."""
    newest = {decision.run_id: decision for decision in reversed(loaded.decided) if decision.action != Action.EXPLOIT}
    rows = []
    for place, (run_id, item) in enumerate(loaded.runs.items(), 1):
        rows.append(Member(item, place, trace_lineage(loaded.runs, item), newest.get(run_id)))
    return sorted(rows, key=lambda row: -row.grouped.scores.values[-1] if len(row.grouped.scores.values) else np.inf)


def trace_lineage(runs: Mapping[UUID, GroupedRun], member: GroupedRun) -> list[Stage]:
    """The stages that a run descends from, oldest first and its own last, as far as their runs are in the group."""
    stages = []
    run: GroupedRun | None = member
    step = max(member.run.last_step or 0, member.since)
    copies = [copy for copy in member.descent if 0 < copy.source_step == member.since]
    while run is not None:
        copy = copies[-1] if copies else None
        stages.append(_make_stage(run, copy, step))
        if copy is None:
            break
        run, step = runs.get(copy.source_run), copy.source_step
        # The checkpoint is of the lineage that its run had by then.
        copies = [item for item in run.descent if item.at < copy.at and item.source_step < step] if run else []
    return stages[::-1]


def _make_stage(run: GroupedRun, copy: Copy | None, last_step: int) -> Stage:
    """The stage since a copy, or since the start of the run."""
    first_step, hyperparameters = (copy.source_step, copy.hyperparameters) if copy else (0, {})
    return Stage(run.run.id, run.run.name, first_step, max(last_step, first_step), run.initial | hyperparameters)


def _list_copies(runs: Mapping[UUID, GroupedRun]) -> Iterator[tuple[Run, Copy, Hyperparameters]]:
    """All copies: the run that made it, and its hyperparameters before."""
    for item in runs.values():
        before: Hyperparameters = item.initial
        for copy in item.descent:
            yield item.run, copy, before
            before = {**before, **copy.hyperparameters}


def _split_curve(member: GroupedRun, most: int) -> list[list[Point]]:
    """The evals of a run, evenly thinned out, in pieces between changes of the eval, such as those by a copy."""
    scores, count = member.scores, min(max(most, FEWEST_POINTS), len(member.scores.steps))
    kept = np.unique(np.linspace(0, len(scores.steps) - 1, count).astype(int))
    steps, values = scores.steps[kept].tolist(), (find_eval_sign(member.run) * scores.values[kept]).tolist()
    points = list(zip(steps, values, strict=True))
    cuts = [0, *(np.flatnonzero(np.diff(scores.versions[kept])) + 1).tolist(), len(points)]
    return [points[first:end] for first, end in pairwise(cuts) if end > first]


def _draw_lanes(
    loaded: LoadedGroup, best: Sequence[Stage], last_step: int
) -> list[tuple[str, float, float, int, int | None]]:
    """The lineages in a row for each run: kind, where it begins and ends, its row, and that of the run it copied.

    The kinds are `present`, `replaced` by a copy, and drawn last `of-best`, what the best run descends from.
    """
    replaced_at = {decision.id: decision.step for decision in loaded.decided}
    kinds: list[tuple[str, Stage, UUID | None]] = []
    for item in loaded.runs.values():
        for copy, following in zip([None, *item.descent], [*item.descent, None], strict=True):
            last = item.run.last_step or 0
            if following:
                last = replaced_at.get(following.decision_id, following.source_step)
            source = copy.source_run if copy else None
            kinds.append(("replaced" if following else "present", _make_stage(item, copy, last), source))
    kinds += [("of-best", stage, best[place - 1].run_id if place else None) for place, stage in enumerate(best)]
    frame = Frame(0, last_step, 0, 0, CURVE_WIDTH, margin=0)
    rows: dict[UUID | None, int] = {run_id: row for row, run_id in enumerate(list(loaded.runs)[:MOST_LANES])}
    return [
        (kind, frame.x(stage.from_step), frame.x(stage.to_step), rows[stage.run_id], rows.get(source))
        for kind, stage, source in kinds
        if stage.run_id in rows
    ]


def _doubt_stop(decision: Decision, runs: Mapping[UUID, GroupedRun]) -> dict[str, float | None] | None:
    """What a stopped run would have needed to end above the best of the others; None if there are no evals.

    `lead`: the last eval of the best of the others. `missing`: how far the run was behind it. `pace`: its improvement
    per step over the second half of its evals.
    """
    item = runs[decision.run_id]
    count = int(np.searchsorted(item.scores.steps, decision.step, "right"))
    others = [
        float(other.scores.values[-1]) for other in runs.values() if other is not item and len(other.scores.values)
    ]
    if not count or not others:
        return None
    steps, values, half = item.scores.steps[:count], item.scores.values[:count], (count - 1) // 2
    planned_end = item.run.total_steps or max(other.run.last_step or 0 for other in runs.values())
    return {
        "lead": find_eval_sign(item.run) * max(others),
        "missing": max(others) - float(values[-1]),
        "steps_left": max(planned_end - decision.step, 0),
        "pace": float((values[-1] - values[half]) / (steps[-1] - steps[half])) if half < count - 1 else None,
    }
