"""A run's metrics as curves over the same steps, drawn by the server, so that they work without scripts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from evalstop_service.store import series
from evalstop_service.store.database import Transaction
from evalstop_service.store.runs import Run
from evalstop_service.store.series import Segment
from evalstop_service.web.dashboard import charted_series
from evalstop_service.web.dashboard.sparkline import Frame

WIDTH, HEIGHT = 1000, 400
STRETCHES = 500


@dataclass(frozen=True)
class Curve:
    """A metric: its points in an SVG of WIDTH x HEIGHT, and the frame that it fills."""

    role: str
    points: str
    frame: Frame


def load_curves(tx: Transaction, run: Run) -> list[Curve]:
    """The eval, the proxy and the KL of a run, those without finite values left out."""
    metric_of_role = {role: metric for metric, role in reversed(charted_series.list_charted(run).items())}
    series_of_role = {role: (run.id, metric_of_role[role]) for role in charted_series.ROLES if role in metric_of_role}
    segments = series.load_segments(tx, series_of_role.values(), STRETCHES)
    drawable = [(role, segments[series]) for role, series in series_of_role.items() if segments.get(series)]
    steps = [item.step for _, stretches in drawable for item in stretches]
    return [_draw_curve(role, stretches, min(steps), max(steps)) for role, stretches in drawable]


def _draw_curve(role: str, stretches: Sequence[Segment], first: int, last: int) -> Curve:
    frame = replace(Frame.around(stretches), first=first, last=last, width=WIDTH, height=HEIGHT, margin=0)
    return Curve(role, frame.line(stretches), frame)
