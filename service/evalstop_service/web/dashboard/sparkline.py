"""The sparkline of a run's eval score, with the best checkpoint and the stop. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from evalstop_service.rules.run_results import BestCheckpoint
from evalstop_service.store.sparklines import Segment

WIDTH, HEIGHT, MARGIN = 132, 34, 4

STRETCHES = 124  # one per pixel


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
    first, last = stretches[0].step, stretches[-1].step
    lowest, highest = min(item.lowest for item in stretches), max(item.highest for item in stretches)

    def x(step: int) -> float:
        share = (step - first) / (last - first) if last > first else 0.5
        return round(MARGIN + min(1.0, max(0.0, share)) * (WIDTH - 2 * MARGIN), 1)

    def y(value: float) -> float:
        # Halves, because the difference of two doubles may overflow.
        share = (value / 2 - lowest / 2) / (highest / 2 - lowest / 2) if highest / 2 > lowest / 2 else 0.5
        return round(HEIGHT - MARGIN - min(1.0, max(0.0, share)) * (HEIGHT - 2 * MARGIN), 1)

    corners = [(x(item.step), y(value)) for item in stretches for value in dict.fromkeys((item.lowest, item.highest))]
    return Sparkline(
        line=" ".join(f"{across},{down}" for across, down in corners),
        last=corners[-1],
        best=(x(best.step), y(best.score)) if best else None,
        stop_x=x(stop_step) if stop_step is not None else None,
    )
