"""The fleet: all running runs on one page, each a strip that shows how far its evals lie below the previous best."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Annotated
from uuid import UUID

from evalstop_detectors.checkpoint import noise
from evalstop_detectors.detectors.detector import Kind
from fastapi import APIRouter, Query, Response

from evalstop_service.domain.run import Call, Verdict
from evalstop_service.runs import watched_metrics
from evalstop_service.store import run_lists
from evalstop_service.store.run_lists import ListedVerdict
from evalstop_service.store.runs import Run, load_runs
from evalstop_service.store.series import Segment
from evalstop_service.web.pages.charts import load_eval_segments
from evalstop_service.web.pages.responses import PageRoute, render_page
from evalstop_service.web.pages.visitor import SignedIn, SiteOf

router = APIRouter(prefix="/runs/fleet", route_class=PageRoute)

MOST_RUNS = 1000
SHOWN_FIRST = 100
"""Number of strips drawn at first. All of them take a second, and those that need a person are at the top."""

CELLS = noise.WINDOW
"""Cells of a strip: as many as the noise estimate uses."""

LEVELS = (2.0, 4.0, 8.0, 16.0)
"""A cell takes the next color so far below the best, in standard deviations."""

_SUPPOSED = {Call.STOP: 1.0, Call.SUSPECT: 0.5, Call.CONTINUE: 0.0}

FARTHEST = 99.0
"""Larger distances are capped."""

RENEWED_SECONDS = 10
"""Refresh interval of an open page. In a fleet some run always changes: following each change would cost more."""


@dataclass(frozen=True)
class Strip:
    """A row: `cells` consecutive evals, and for each level from 1 on the line through its cells, one unit high.

    `distance`: of the last cell below the best, in standard deviations of the noise. `fallen`: how many cells are at a
    level. `probability` of having turned: None if the policy has no detector that estimates it.
    """

    run_id: UUID
    name: str
    verdict: Call
    probability: float | None
    cells: int
    lines: tuple[tuple[int, str], ...]
    distance: float | None
    fallen: int


@router.get("")
def show_fleet(
    site: SiteOf, visitor: SignedIn, shown: Annotated[int, Query(ge=1, le=MOST_RUNS)] = SHOWN_FIRST
) -> Response:
    """The first `shown` of the running runs, the most likely to have turned first."""
    revision = str(int(site.clock().timestamp()) // RENEWED_SECONDS)
    if visitor.seen == revision:
        return Response(status_code=204)
    with site.database.reading() as tx:
        running = run_lists.list_running_verdicts(tx, visitor.project.id, MOST_RUNS + 1)
        ranked = sorted(running[:MOST_RUNS], key=_rank_run)
        loaded = load_runs(tx, [verdict.run_id for verdict in ranked[:shown]])
        runs = [run for verdict in ranked if (run := loaded.get(verdict.run_id)) is not None]
        segments = load_eval_segments(tx, runs, CELLS)
    return render_page(
        "fleet.html",
        visitor=visitor,
        strips=[draw_strip(run, segments.get(run.id, ())) for run in runs],
        ranked=len(ranked),
        more=len(running) > MOST_RUNS,
        levels=LEVELS,
        renewed_seconds=RENEWED_SECONDS,
        revision=revision,
    )


def draw_strip(run: Run, segments: Sequence[Segment]) -> Strip:
    """The strip of a run: the evals since the eval was last changed."""
    since = max((change.step for change in run.eval_changes), default=0)
    distances = _measure_distances(run, [item for item in segments if item.step >= since])
    levels = [bisect_right(LEVELS, distance) for distance in distances]
    return Strip(
        run.id,
        run.name,
        run.verdict.verdict,
        _find_probability(run.verdict),
        len(levels),
        _draw_lines(levels),
        distances[-1] if distances else None,
        sum(level > 0 for level in levels),
    )


def _measure_distances(run: Run, segments: Sequence[Segment]) -> list[float]:
    """How far each segment lies below the best so far, in standard deviations of the noise; 0 while it is unknown.

    From its step on, the smoothed best is used: the highest value is partly noise.
    """
    metric = watched_metrics.find_eval_metric(run)
    if metric is None or not segments:
        return []
    sign = watched_metrics.find_sign(run, metric)
    values = [noise.clipped(sign * (item.lowest / 2 + item.highest / 2)) for item in segments]
    sd = noise.estimate(noise.take_values(values)).sd
    bests = list(accumulate(values, max))
    best_checkpoint = run.best_checkpoint
    if best_checkpoint is not None and best_checkpoint.smoothed is not None and not run.best_is_outdated:
        smoothed = noise.clipped(sign * best_checkpoint.smoothed)
        bests = [
            best if item.step < best_checkpoint.step else smoothed for best, item in zip(bests, segments, strict=True)
        ]
    return [
        min(max(0.0, best - value) / sd, FARTHEST) if sd > 0 else 0.0 for best, value in zip(bests, values, strict=True)
    ]


def _draw_lines(levels: Sequence[int]) -> tuple[tuple[int, str], ...]:
    """For each level the segments of the line through its cells; consecutive cells of one level are one segment."""
    pieces: dict[int, list[str]] = {}
    start = 0
    for level, group in groupby(levels):
        length = len(list(group))
        if level:
            pieces.setdefault(level, []).append(f"M{start} .5h{length}")
        start += length
    return tuple((level, "".join(segments)) for level, segments in sorted(pieces.items()))


def _rank_run(listed: ListedVerdict) -> tuple[float, str]:
    """Sort key: most likely to have turned first; by the verdict if no detector estimates it."""
    probability = _find_probability(listed.verdict)
    return -(_SUPPOSED[listed.verdict.verdict] if probability is None else probability), listed.name


def _find_probability(verdict: Verdict) -> float | None:
    """The probability of having turned; None if the policy has no detector that estimates it."""
    return max((item.value for item in verdict.evidence if item.kind == Kind.POSTERIOR), default=None)
