"""The evals of the runs of a group, laid over one another. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

from evalstop_service.rules.run_results import Call
from evalstop_service.store.runs import Run
from evalstop_service.store.sparklines import Segment
from evalstop_service.web.dashboard.sparkline import Frame

WIDTH, HEIGHT, MARGIN = 720, 200, 6


@dataclass(frozen=True)
class GroupLine:
    """The evals of one run, as the points of a line."""

    run_id: UUID
    name: str
    verdict: Call
    points: str


@dataclass(frozen=True)
class GroupChart:
    """Lines for an SVG of WIDTH x HEIGHT, and what they lie between."""

    lines: Sequence[GroupLine]
    first_step: int
    last_step: int
    lowest: float
    highest: float


def draw_group(runs: Sequence[Run], drawn: Mapping[UUID, Sequence[Segment]]) -> GroupChart | None:
    """The chart of these runs; None without observations of their evals."""
    with_evals = [(run, drawn[run.id]) for run in runs if drawn.get(run.id)]
    if not with_evals:
        return None
    frame = Frame.around([item for _, stretches in with_evals for item in stretches], WIDTH, HEIGHT, MARGIN)
    lines = [GroupLine(run.id, run.name, run.verdict.verdict, frame.line(stretches)) for run, stretches in with_evals]
    return GroupChart(lines, frame.first, frame.last, frame.lowest, frame.highest)
