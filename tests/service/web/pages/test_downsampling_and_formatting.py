"""Sparklines and number formatting: properties that hold for any values."""

from __future__ import annotations

import math
import sys
from datetime import UTC, datetime

from evalstop_service.domain.decision_lifecycle import DecisionState
from evalstop_service.domain.run import BestCheckpoint
from evalstop_service.store.decisions import DecisionChange
from evalstop_service.web.pages import charts, formatting
from hypothesis import given
from hypothesis import strategies as st

FINITE = st.floats(-sys.float_info.max, sys.float_info.max)


@given(st.lists(st.tuples(st.integers(0, 2**53), FINITE), max_size=50), FINITE, st.integers(0, 2**53))
def test_sparkline_stays_in_its_frame(points: list[tuple[int, float]], score: float, step: int) -> None:
    """Every coordinate lies within the drawing, whatever the numbers."""
    drawing = charts.draw_sparkline(sorted(points), BestCheckpoint(step, "s3://a", score, "raw_maximum"), step)
    if not points:
        assert drawing is None
        return
    assert drawing is not None
    corners = [tuple(map(float, corner.split(","))) for corner in drawing.line.split()]
    for x, y in [*corners, drawing.last, drawing.best or (0.0, 0.0), (drawing.stop_x or 0.0, 0.0)]:
        assert 0 <= x <= charts.WIDTH
        assert 0 <= y <= charts.HEIGHT


def test_higher_scores_are_drawn_higher() -> None:
    """The y coordinate falls as the eval rises."""
    drawing = charts.draw_sparkline([(0, 1.0), (10, 2.0)], None, None)
    assert drawing is not None
    first, last = (float(corner.split(",")[1]) for corner in drawing.line.split())
    assert last < first


@given(st.floats() | st.none())
def test_every_float_is_formatted(value: float | None) -> None:
    """Any float gives a short text with a true minus sign."""
    text = formatting.format_number(value)
    assert text
    assert len(text) <= 12
    assert "-" not in text


def test_number_formats() -> None:
    """Four significant digits, whole numbers without a point, and names for NaN and the infinities."""
    assert [
        formatting.format_number(value) for value in (0.123456, 5.0, -2.5, 1234567.0, math.nan, math.inf, -math.inf)
    ] == [
        "0.1235",
        "5",
        "−2.5",
        "1.235e+06",
        "NaN",
        "∞",
        "−∞",
    ]
    assert formatting.format_step(1234567) == "1,234,567"


def test_random_draw_is_shown_in_percent() -> None:
    """Of a stop that is held out, or that the rollout stage leaves out, the page shows the draw and its limit."""
    changes = [
        DecisionChange(0, DecisionState.HELD_OUT, "evalstop", "", details, datetime(2026, 3, 1, tzinfo=UTC))
        for details in ({"held_out_share": 0.2, "drawn": 0.0734}, {"enforced_share": 0.0, "drawn": 0.5}, {})
    ]
    assert [formatting.list_change_details(change) for change in changes] == [
        {"share held out": "20.0 %", "drawn": "7.3 %"},
        {"share carried out": "0.0 %", "drawn": "50.0 %"},
        {},
    ]
