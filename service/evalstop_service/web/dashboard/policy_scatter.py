"""The scatter of policies: the GPU-hours that their right stops save, over the false stops that they make. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from evalstop_service.evaluation.figures import GroupFigures
from evalstop_service.rules.confidence_sequences import Estimate

HEIGHT = 260
"""Height of the drawing in pixels; its width is that of its container."""

LABEL_PX, LABEL_PERCENT = 15, 35
"""Height of a label, and its maximum width on a phone; overlapping labels are placed below each other."""

MOST_TICKS = 5
LEAST_SHARE = 0.05


@dataclass(frozen=True)
class Dot:
    """A version of a policy: its figures, and its position in percent of the width and height."""

    name: str
    version: int
    false_stops: Estimate
    saved: float
    x: float
    low_x: float
    high_x: float
    y: float
    label_px: int

    @property
    def is_right(self) -> bool:
        """Whether it is so far to the right that its label goes to the left."""
        return _is_right(self.x)


@dataclass(frozen=True)
class Scatter:
    """Dots, and the ticks of both axes: positions in percent, and values."""

    dots: Sequence[Dot]
    shares: Sequence[tuple[float, float]]
    hours: Sequence[tuple[float, float]]


def sum_saved(group: GroupFigures) -> float:
    """The GPU-hours that the right stops of a policy saved, or would have saved."""
    return group.hours.saved + group.hours.would_have_saved


def draw_scatter(by_policy: Sequence[GroupFigures]) -> Scatter | None:
    """The scatter of all versions with known false stops; None without any."""
    estimated = [
        (group, estimate) for group in by_policy if (estimate := group.false_stops) and estimate.value is not None
    ]
    if not estimated:
        return None
    most_share = min(1.0, max(LEAST_SHARE, 1.3 * max(estimate.value or 0.0 for _, estimate in estimated)))
    most_hours = 1.1 * max(sum_saved(group) for group, _ in estimated) or 1.0

    def x(share: float) -> float:
        return round(100 * min(share / most_share, 1.0), 2)

    dots: list[Dot] = []
    for group, estimate in sorted(estimated, key=lambda pair: -sum_saved(pair[0])):
        saved, at = sum_saved(group), x(estimate.value or 0.0)
        y = round(100 * (1 - saved / most_hours), 2)
        name, version = group.key
        dots.append(
            Dot(name, version, estimate, saved, at, x(estimate.low), x(estimate.high), y, _place_label(dots, at, y))
        )
    return Scatter(
        dots,
        [(x(value), value) for value in list_ticks(most_share)],
        [(round(100 * (1 - value / most_hours), 2), value) for value in list_ticks(most_hours)],
    )


def list_ticks(highest: float) -> list[float]:
    """Round numbers from 0 up to `highest`, at most `MOST_TICKS` in addition to 0."""
    power = 10.0 ** math.floor(math.log10(highest / MOST_TICKS))
    step = next(power * multiple for multiple in (1, 2, 5, 10) if highest / (power * multiple) <= MOST_TICKS)
    return [step * index for index in range(int(highest / step) + 1)]


def _is_right(x: float) -> bool:
    return x > 100 - LABEL_PERCENT


def _label_start(x: float) -> float:
    return x - LABEL_PERCENT if _is_right(x) else x


def _place_label(placed: Sequence[Dot], x: float, y: float) -> int:
    """The vertical offset in pixels of a dot's label, so that it does not overlap others."""
    beside = [dot for dot in placed if abs(_label_start(dot.x) - _label_start(x)) < LABEL_PERCENT]
    dot_at = at = y * HEIGHT / 100
    for other in sorted(dot.y * HEIGHT / 100 + dot.label_px for dot in beside):
        if abs(other - at) < LABEL_PX:
            at = other + LABEL_PX
    return round(at - dot_at)
