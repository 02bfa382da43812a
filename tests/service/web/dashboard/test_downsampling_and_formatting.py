"""The laws of downsampling, of sparklines and of formatting."""

from __future__ import annotations

import math
import sys

from evalstop_service.rules.run_results import BestCheckpoint
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.sparklines import Segment
from evalstop_service.web.dashboard import formatting, sparkline
from evalstop_service.web.dashboard.downsampling import downsample
from hypothesis import given
from hypothesis import strategies as st

VALUES = st.lists(st.floats() | st.integers(-3, 3).map(float), max_size=300)


@given(VALUES, st.integers(8, 100))
def test_a_thinned_series_keeps_its_spikes(values: list[float], most: int) -> None:
    """Few enough points, all of them measured, in order, with the ends, the lowest, the highest and a gap if any."""
    points = [PostedObservation("eval", step, value) for step, value in enumerate(values)]
    kept = downsample(points, most)
    assert len(kept) <= most
    assert [point.step for point in kept] == sorted({point.step for point in kept})
    assert all(points[point.step] is point for point in kept)
    finite = [value for value in values if math.isfinite(value)]
    kept_finite = [point.value for point in kept if math.isfinite(point.value)]
    if finite:
        assert (min(kept_finite), max(kept_finite)) == (min(finite), max(finite))
    if values:
        assert (kept[0], kept[-1]) == (points[0], points[-1])
    assert (len(finite) < len(values)) == (len(kept_finite) < len(kept))
    if len(points) <= most:
        assert kept == points


FINITE = st.floats(-sys.float_info.max, sys.float_info.max)


@given(st.lists(st.tuples(st.integers(0, 2**53), FINITE, FINITE), max_size=50), FINITE, st.integers(0, 2**53))
def test_a_sparkline_stays_in_its_frame(rows: list[tuple[int, float, float]], score: float, step: int) -> None:
    """Whatever the numbers, every coordinate lies in the drawing."""
    stretches = [Segment(at, min(one, other), max(one, other)) for at, one, other in sorted(rows)]
    drawing = sparkline.draw_sparkline(stretches, BestCheckpoint(step, "s3://a", score, "raw_maximum"), step)
    if not stretches:
        assert drawing is None
        return
    assert drawing is not None
    corners = [tuple(map(float, corner.split(","))) for corner in drawing.line.split()]
    for x, y in [*corners, drawing.last, drawing.best or (0.0, 0.0), (drawing.stop_x or 0.0, 0.0)]:
        assert 0 <= x <= sparkline.WIDTH
        assert 0 <= y <= sparkline.HEIGHT


def test_higher_scores_are_drawn_higher() -> None:
    """The line goes up where the eval goes up."""
    drawing = sparkline.draw_sparkline([Segment(0, 1.0, 1.0), Segment(10, 2.0, 2.0)], None, None)
    assert drawing is not None
    first, last = (float(corner.split(",")[1]) for corner in drawing.line.split())
    assert last < first


@given(st.floats() | st.none())
def test_every_number_has_words(value: float | None) -> None:
    """Any float is written, with a true minus sign and no more than four digits of noise."""
    text = formatting.format_number(value)
    assert text
    assert len(text) <= 12
    assert "-" not in text


def test_numbers_read_well() -> None:
    """Four significant digits, whole numbers without a point, the three that are no numbers by name."""
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
    assert formatting.format_step(1234567) == "1\u202f234\u202f567"
