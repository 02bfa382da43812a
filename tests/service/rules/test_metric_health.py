"""Metrics that tell nothing any more are found; healthy ones, however slow, coarse or late, are left alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise

import pytest
from evalstop_service.rules.metric_health import (
    NEWEST,
    FaultKind,
    MetricFault,
    MetricReadings,
    Reading,
    RunProgress,
    find_faults,
    select_new_faults,
)
from hypothesis import given
from hypothesis import strategies as st

from tests.service.project_fixture import NOW


def at(seconds: float) -> RunProgress:
    return RunProgress(NOW, NOW + timedelta(seconds=seconds), int(seconds))


def readings(
    values: Sequence[float], *, steps: float = 100, seconds: float = 100, late_seconds: float = 0
) -> list[Reading]:
    """Values at even steps, each after as many seconds; their posts come late by so much."""
    return [
        Reading(int(i * steps), value, NOW + timedelta(seconds=i * seconds + late_seconds))
        for i, value in enumerate(values, 1)
    ][-NEWEST:]


def kinds(newest: Sequence[Reading], progress: RunProgress, *, promised: bool = True) -> list[str]:
    return [one.kind for one in find_faults([MetricReadings("eval", newest, promised)], progress)]


RISING = [i / 7 for i in range(1, 11)]


def test_a_metric_that_comes_is_well() -> None:
    """Ten evals, the last of them just now."""
    assert kinds(readings(RISING), at(1000)) == []


def test_one_that_came_and_comes_no_more_has_ceased() -> None:
    """Five gaps pass without it while others go on: perhaps it was renamed."""
    assert kinds(readings(RISING), at(1500)) == []
    assert kinds(readings(RISING), at(1501)) == ["ceased"]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_one_that_came_hardly_ever_is_given_more_time(count: int) -> None:
    """Of few values little is known: ten gaps must pass."""
    newest = readings(RISING[:count])
    assert kinds(newest, at(100 * count + 1000)) == []
    assert kinds(newest, at(100 * count + 1001)) == ["ceased"]


def test_evals_that_are_made_elsewhere_may_be_late_by_any_number_of_steps() -> None:
    """The others are far ahead in steps, but the evals arrive as regularly as ever."""
    ahead = replace(at(60_100), last_step=60_100)
    assert kinds(readings(RISING, late_seconds=59_000), ahead) == []


def test_a_trainer_that_waits_loses_time_and_no_steps() -> None:
    """A pause of the whole run, after which it goes on, is nobody's death."""
    assert kinds(readings(RISING), replace(at(1050), reported_at=NOW + timedelta(days=3))) == []


def test_evals_at_doubling_steps_do_not_cease() -> None:
    """Gaps may grow: the next is as long as all before together."""
    newest = [Reading(2**i, i / 7, NOW + timedelta(seconds=2**i)) for i in range(12)]
    assert kinds(newest, at(2**12 - 1)) == []


def test_many_values_in_one_post_show_one_gap() -> None:
    """A log that is sent whole every hour has data between two posts."""
    newest = [replace_time(reading, 3600) for reading in readings(RISING * 4, steps=10)]
    assert kinds(newest, at(7000)) == []
    assert kinds(newest, at(3600 + 5 * 3600 + 1)) == ["ceased"]


def replace_time(reading: Reading, seconds: float) -> Reading:
    return reading._replace(received_at=NOW + timedelta(seconds=seconds))


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ([*RISING, math.nan, math.inf], []),
        ([*RISING, math.nan, math.inf, -math.inf], ["not_finite"]),
        ([*RISING, math.nan, math.nan, 0.5, math.nan], []),
        ([math.nan] * 2, []),
        ([*RISING, *[0.25] * 7], []),
        ([*RISING, *[0.25] * 8], ["constant"]),
        ([0.0] * 8, ["constant"]),
        ([1, 0, 0, 0, 1, 1, 1, 1, 0, *[1] * 11], []),
        ([1, 0, 0, 0, 1, 1, 1, 1, 0, *[1] * 12], ["constant"]),
        ([0.1 + 0.2, 0.3] * 8, []),
    ],
)
def test_values_that_say_nothing(values: list[float], found: list[str]) -> None:
    """Three in a row that are not finite; eight that are the same, and three times as many as ever before."""
    assert kinds(readings(values), at(100 * len(values))) == found


def test_one_that_never_came_is_missing_once_the_run_is_well_under_way() -> None:
    """A third of the planned steps is enough; of a run without a plan six hours are waited for."""
    planned = replace(at(300), total_steps=900)
    assert kinds([], replace(planned, last_step=299)) == []
    assert kinds([], planned) == ["missing"]
    assert kinds([], at(6 * 3600 - 1)) == []
    assert kinds([], at(6 * 3600)) == ["missing"]


def test_what_nobody_promised_may_be_missing() -> None:
    """A role that a metric has by default is no promise that it will come; gone silent, it has no data all the same."""
    assert kinds([], at(10**6), promised=False) == []
    assert kinds(readings(RISING), at(10**6), promised=False) == ["ceased"]


def test_where_nothing_goes_on_nothing_falls_behind() -> None:
    """A run that has observed nothing is silent, not without data."""
    assert kinds([], replace(at(10**6), last_step=None)) == []


def test_a_new_fault_is_one_that_was_not_known() -> None:
    """The same fault of a metric is told once, in another way again."""
    first = [MetricFault("a", FaultKind.CONSTANT, "x"), MetricFault("b", FaultKind.CEASED, "y")]
    assert select_new_faults(
        first, [MetricFault("a", FaultKind.CONSTANT, "z"), MetricFault("b", FaultKind.NOT_FINITE, "y")]
    ) == [MetricFault("b", FaultKind.NOT_FINITE, "y")]


finite = st.floats(-1e6, 1e6)


@st.composite
def healthy(draw: st.DrawFn) -> tuple[list[Reading], RunProgress]:
    """A metric of some pace with jitter, finite and not constant, and a run that is on the way to its next value."""
    count = draw(st.integers(1, 60))
    step_gap, second_gap = draw(st.integers(1, 10_000)), draw(st.floats(0.01, 10_000))
    step, moment, found = 0, 0.0, []
    for index in range(count):
        jitter = draw(st.floats(1, 2))
        step += max(1, int(step_gap * jitter))
        moment += second_gap * jitter
        found.append(Reading(step, draw(finite) + index % 2 * 1e7, NOW + timedelta(seconds=moment)))
    next_in = draw(st.floats(0, 2))
    reported_at = NOW + timedelta(seconds=moment + second_gap * next_in)
    return found[-NEWEST:], RunProgress(NOW, reported_at, step + int(step_gap * next_in))


@given(healthy())
def test_a_healthy_metric_has_no_fault(run: tuple[list[Reading], RunProgress]) -> None:
    """Whatever its pace, and with a jitter of half of it, it is left alone."""
    newest, progress = run
    assert find_faults([MetricReadings("eval", newest)], progress) == ()


@given(healthy(), st.integers(11, 1000))
def test_whatever_ceases_is_found(run: tuple[list[Reading], RunProgress], gaps: int) -> None:
    """Enough of its longest gaps in steps and time, and it has ceased."""
    newest, progress = run
    steps = max([b.step - a.step for a, b in pairwise(newest)] or [newest[0].step])
    moments = [reading.received_at for reading in newest]
    longest = max([b - a for a, b in pairwise(moments)] or [moments[0] - NOW])
    later = replace(progress, last_step=newest[-1].step + gaps * steps, reported_at=moments[-1] + gaps * longest)
    assert [one.kind for one in find_faults([MetricReadings("eval", newest)], later)] == ["ceased"]


@given(healthy(), st.integers(-(10**6), 10**6), st.floats(0.5, 8))
def test_clocks_and_units_do_not_matter(run: tuple[list[Reading], RunProgress], shift: int, scale: float) -> None:
    """Another time of day and another unit of the metric lead to the same finding."""
    newest, progress = run
    away = timedelta(seconds=shift)
    moved = [Reading(step, value * scale, moment + away) for step, value, moment in newest]
    there = replace(progress, begun_at=progress.begun_at + away, reported_at=progress.reported_at + away)
    ours, theirs = (find_faults([MetricReadings("eval", n)], p) for n, p in ((newest, progress), (moved, there)))
    assert [one.kind for one in ours] == [one.kind for one in theirs]
