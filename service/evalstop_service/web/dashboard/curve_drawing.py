"""A run's metrics as curves over its steps, drawn by the server, so that they are there without scripts. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from evalstop_service.store.sparklines import Segment

WIDTH, HEIGHT = 1000, 400
STRETCHES = 500


@dataclass(frozen=True)
class Curve:
    """A metric: its points in an SVG of WIDTH x HEIGHT, and the values at the bottom and at the top."""

    role: str
    points: str
    lowest: float
    highest: float


@dataclass(frozen=True)
class Panels:
    """Curves over the same steps."""

    curves: Sequence[Curve]
    first: int
    last: int

    def x(self, step: int) -> float:
        """How far from the left a step is."""
        share = (step - self.first) / (self.last - self.first) if self.last > self.first else 0.5
        return round(WIDTH * min(1.0, max(0.0, share)), 1)


def draw_panels(segments: Sequence[tuple[str, Sequence[Segment]]]) -> Panels | None:
    """The curves of these roles, those without finite values left out; None if that is all."""
    known = [(role, stretches) for role, stretches in segments if stretches]
    if not known:
        return None
    steps = [item.step for _, stretches in known for item in stretches]
    panels = Panels((), min(steps), max(steps))
    return Panels([_draw_curve(panels, role, stretches) for role, stretches in known], panels.first, panels.last)


def _draw_curve(panels: Panels, role: str, stretches: Sequence[Segment]) -> Curve:
    lowest, highest = min(item.lowest for item in stretches), max(item.highest for item in stretches)

    def y(value: float) -> float:
        # Halves, because the difference of two doubles may overflow.
        share = (value / 2 - lowest / 2) / (highest / 2 - lowest / 2) if highest > lowest else 0.5
        return round(HEIGHT * (1 - share), 1)

    corners = [(item.step, value) for item in stretches for value in dict.fromkeys((item.lowest, item.highest))]
    return Curve(role, " ".join(f"{panels.x(step)},{y(value)}" for step, value in corners), lowest, highest)
