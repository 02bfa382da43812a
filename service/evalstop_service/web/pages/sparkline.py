"""Draws lines as SVG, and the sparkline of a run: its eval score, best checkpoint and stop. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from evalstop_service.domain.run import BestCheckpoint
from evalstop_service.store.series import Segment

WIDTH, HEIGHT, MARGIN = 132, 34, 4

STRETCHES = 124  # one per pixel


@dataclass(frozen=True)
class Frame:
    """The range of steps and values of a drawing, and its size."""

    first: int
    last: int
    lowest: float
    highest: float
    width: int = WIDTH
    height: int = HEIGHT
    margin: int = MARGIN

    @classmethod
    def around(cls, stretches: Sequence[Segment]) -> Self:
        """The frame that contains all of these segments; there is at least one."""
        lowest, highest = min(item.lowest for item in stretches), max(item.highest for item in stretches)
        return cls(stretches[0].step, stretches[-1].step, lowest, highest)

    def x(self, step: int) -> float:
        """The x coordinate of a step."""
        share = (step - self.first) / (self.last - self.first) if self.last > self.first else 0.5
        return round(self.margin + min(1.0, max(0.0, share)) * (self.width - 2 * self.margin), 1)

    def y(self, value: float) -> float:
        """The y coordinate of a value."""
        # Halved, because the difference of two doubles may overflow.
        lowest, highest = self.lowest / 2, self.highest / 2
        share = (value / 2 - lowest) / (highest - lowest) if highest > lowest else 0.5
        return round(self.height - self.margin - min(1.0, max(0.0, share)) * (self.height - 2 * self.margin), 1)

    def line(self, stretches: Sequence[Segment]) -> str:
        """The points of a line through the lowest and the highest value of each stretch."""
        return " ".join(f"{x},{y}" for x, y in self.corners(stretches))

    def corners(self, stretches: Sequence[Segment]) -> list[tuple[float, float]]:
        """The same as pairs."""
        return [
            (self.x(item.step), self.y(value))
            for item in stretches
            for value in dict.fromkeys((item.lowest, item.highest))
        ]


@dataclass(frozen=True)
class Sparkline:
    """Coordinates for an SVG of WIDTH x HEIGHT."""

    line: str
    last: tuple[float, float]
    best: tuple[float, float] | None
    stop_x: float | None


def draw_sparkline(
    stretches: Sequence[Segment], best: BestCheckpoint | None, stop_step: int | None
) -> Sparkline | None:
    """The sparkline of a run; None without observations."""
    if not stretches:
        return None
    frame = Frame.around(stretches)
    return Sparkline(
        line=frame.line(stretches),
        last=frame.corners(stretches[-1:])[-1],
        best=(frame.x(best.step), frame.y(best.score)) if best else None,
        stop_x=frame.x(stop_step) if stop_step is not None else None,
    )
