"""Settings as people write them: stop hours, durations, and rules on metrics."""

from __future__ import annotations

import math
import re
import statistics
from datetime import UTC, datetime, time, timedelta
from zoneinfo import ZoneInfo

import pytest
from evalstop_service.domain.decision_events import WindowEnded, apply_event
from evalstop_service.domain.decision_lifecycle import DecisionState, Lifecycle, Record, Timeouts
from evalstop_service.domain.metric_rules import PATTERN, Point, find_absence, find_breach, parse_rule
from evalstop_service.domain.times import (
    DAYS,
    UNITS,
    StopHours,
    find_morning,
    format_duration,
    parse_duration,
    parse_stop_hours,
)
from hypothesis import given
from hypothesis import strategies as st

ZONES = st.sampled_from(["UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Asia/Kathmandu"])
MINUTES = st.times().map(lambda at: f"{at:%H:%M}")
HOURS = st.builds(
    StopHours,
    st.lists(st.sampled_from(DAYS), min_size=1, unique=True).map(tuple),
    MINUTES,
    MINUTES,
    ZONES,
)
# A fifth of the times lies on a day on which clocks are changed.
CHANGES = [datetime(2026, 3, 29, tzinfo=UTC), datetime(2026, 10, 25, tzinfo=UTC), datetime(2026, 11, 1, tzinfo=UTC)]
TIMES = st.one_of(
    st.integers(0, 525_600).map(lambda minutes: datetime(2026, 1, 1, tzinfo=UTC) + timedelta(minutes=minutes)),
    st.builds(lambda day, minutes: day + timedelta(minutes=minutes), st.sampled_from(CHANGES), st.integers(-120, 1440)),
)


def is_open(hours: StopHours, at: datetime) -> bool:
    """The rule by the wall clock, minute by minute from the last time that the hours began."""
    local = at.astimezone(ZoneInfo(hours.time_zone))
    now, begin, end = (time.fromisoformat(text) for text in (f"{local:%H:%M}", hours.begin, hours.end))
    begun = local.date() if now >= begin else local.date() - timedelta(days=1)
    since_begin = (datetime.combine(local.date(), now) - datetime.combine(begun, begin)).total_seconds()
    length = (datetime.combine(begun, end) - datetime.combine(begun, begin)).total_seconds() % 86_400 or 86_400
    return DAYS[begun.weekday()] in hours.days and since_begin < length


@given(hours=HOURS, at=TIMES)
def test_opening_lies_within_the_hours(hours: StopHours, at: datetime) -> None:
    """The next opening is within the hours, never before the asked time, and at that time if stops may go out then."""
    opening = hours.find_opening(at)
    assert opening >= at
    assert is_open(hours, opening)
    assert (opening == at) == is_open(hours, at)
    offsets = {
        (at + timedelta(hours=number)).astimezone(ZoneInfo(hours.time_zone)).utcoffset() for number in range(192)
    }
    if len(offsets) == 1:  # no clock is changed in between, so the hours cannot begin at another time of day
        between = (at + timedelta(minutes=number) for number in range(1, int((opening - at).total_seconds() / 60)))
        assert not any(is_open(hours, moment) for moment in between)


@given(hours=HOURS, at=TIMES)
def test_hours_survive_their_text(hours: StopHours, at: datetime) -> None:
    """Hours are the same after a round trip through their text; equal times are whole days."""
    assert parse_stop_hours(str(hours)) == hours
    assert StopHours(DAYS, "00:00", "00:00", hours.time_zone).contains(at)
    morning = find_morning(at, ZoneInfo(hours.time_zone))
    assert timedelta(0) < morning - at <= timedelta(hours=25)
    assert f"{morning.astimezone(ZoneInfo(hours.time_zone)):%H:%M}" == "09:00"


def test_hours_are_written_by_days_times_and_zone() -> None:
    """Ranges of days may pass the end of the week; hours that cross midnight belong to the day they begin on."""
    hours = parse_stop_hours("fri-mon 22:00-06:00 Europe/Berlin")
    assert hours == StopHours(("fri", "sat", "sun", "mon"), "22:00", "06:00", "Europe/Berlin")
    assert hours.contains(datetime(2026, 1, 6, 4, 59, tzinfo=UTC)), "Tuesday morning belongs to Monday"
    assert hours.find_opening(datetime(2026, 1, 6, 5, tzinfo=UTC)) == datetime(2026, 1, 9, 21, tzinfo=UTC)


@pytest.mark.parametrize(
    "written",
    [
        *("", "always", "mon-fri", "mon-fro 09:00-18:00", "mon 9-18", "mon 09:00-24:00", "mon,mon 09:00-18:00"),
        *("mon 09:00-18:00 Mars/Olympus", "mon 09:00-18:00 ../etc", "mon 09:00-18:00 America", {"days": ["mon"]}, 7),
    ],
)
def test_wrong_hours_are_refused(written: object) -> None:
    """What is wrong with hours is said."""
    with pytest.raises(ValueError, match=r"write|days are|time of day|time zone"):
        parse_stop_hours(written)


@given(seconds=st.integers(0, 10**8))
def test_duration_survives_its_text(seconds: int) -> None:
    """A duration in all its units is exact; in two it is off by half of the smaller one at most."""
    assert parse_duration(format_duration(seconds, parts=4)) == seconds
    rounded = parse_duration(format_duration(seconds))
    largest = next((number for number, size in enumerate(UNITS.values()) if seconds >= size), 3)
    assert abs(rounded - seconds) <= list(UNITS.values())[min(largest + 1, 3)] / 2


@pytest.mark.parametrize("text", ["", "5", "m", "1m1h", "1h1h", "-1m", "1.5h", "15m\n", "1e3s", "\u0661m"])
def test_wrong_durations_are_refused(text: str) -> None:
    """A duration names each unit once, the largest first."""
    with pytest.raises(ValueError, match="a duration such as"):
        parse_duration(text)


@given(hours=HOURS, at=TIMES)
def test_stop_goes_out_within_the_hours_only(hours: StopHours, at: datetime) -> None:
    """A window that ended while the service was away, or under other hours, stays open until the hours begin."""
    pending = Lifecycle(DecisionState.PENDING, due_at=at - timedelta(hours=3))
    after, instructions = apply_event(pending, WindowEnded(at, at), Timeouts(900.0, 300.0, hours))
    opening = hours.find_opening(at)
    if opening > at:
        assert (after.state, after.due_at) == (DecisionState.PENDING, opening)
        assert [type(instruction) for instruction in instructions] == [Record]
    else:
        assert after.state is DecisionState.REQUESTED


value_lists = st.lists(st.one_of(st.integers(-50, 50).map(float), st.just(math.nan), st.just(math.inf)), max_size=30)


def observe_values(values: list[float]) -> list[Point]:
    return [(10 * place, value) for place, value in enumerate(values)]


@given(text=st.from_regex(re.compile(PATTERN, re.ASCII), fullmatch=True))
def test_whatever_the_schema_allows_is_a_rule(text: str) -> None:
    """Each text that fits the pattern of the OpenAPI document is parsed; bounds and pauses are finite."""
    rule = parse_rule(text)
    assert rule.text == text
    assert math.isfinite(rule.bound)
    assert rule.pause_seconds >= 60


@pytest.mark.parametrize(
    "text",
    [
        *("", "kl", "kl >", "kl > x", "kl > 1 over 5", "kl change > 1 over 201", "kl absent_for 0m"),
        *("a b > 1", "a,b > 1", "kl > 1 every 30s", "kl > 1\n"),
    ],
)
def test_other_texts_are_refused(text: str) -> None:
    """A text that is no rule is refused with examples of rules."""
    with pytest.raises(ValueError, match=r"kl > 20|single line"):
        parse_rule(text)


@given(values=value_lists, bound=st.integers(-60, 60))
def test_threshold_compares_the_last_value(values: list[float], bound: int) -> None:
    """A threshold is met exactly if the last value is beyond it; NaN never is."""
    breach = find_breach(parse_rule(f"kl > {bound}"), observe_values(values))
    assert (breach is not None) == (bool(values) and values[-1] > bound)
    if breach is not None:
        assert breach.step == 10 * (len(values) - 1)


@given(values=value_lists, over=st.integers(2, 10), sign=st.sampled_from("<>"))
def test_change_compares_with_an_earlier_value(values: list[float], over: int, sign: str) -> None:
    """A change is the last value less the one so many observations before, and needs both."""
    rule = parse_rule(f"loss change {sign} 3 over {over}")
    change = values[-1] - values[-1 - over] if len(values) > over else math.nan
    expected = change > 3 if sign == ">" else change < 3
    assert (find_breach(rule, observe_values(values)) is not None) == expected


@given(values=st.lists(st.integers(-50, 50).map(float), max_size=30), over=st.integers(2, 10))
def test_z_score_is_in_deviations_of_the_values_before(values: list[float], over: int) -> None:
    """A z-score needs enough values that differ, and does not depend on the unit."""
    rule = parse_rule(f"grad_norm z_score > 2 over {over}")
    earlier = values[-1 - over : -1] if len(values) > over else []
    found = find_breach(rule, observe_values(values)) is not None
    if len(set(earlier)) < 2:
        assert not found
        return
    beyond = values[-1] - statistics.fmean(earlier) - 2 * statistics.pstdev(earlier)
    scaled = find_breach(rule, observe_values([4 * value + 128 for value in values])) is not None
    assert abs(beyond) < 1e-6 or (found, scaled) == (beyond > 0, beyond > 0)


@given(values=value_lists, text=st.sampled_from(["kl > 3", "kl change > 3 over 4", "kl z_score > 1 over 4"]))
def test_only_the_values_that_a_rule_needs_count(values: list[float], text: str) -> None:
    """Values before those that a rule needs change nothing."""
    rule, points = parse_rule(text), observe_values(values)
    assert repr(find_breach(rule, points)) == repr(find_breach(rule, points[-1 - rule.over :]))


def test_absence_lasts_as_long_as_it_says() -> None:
    """A metric is absent from the stated duration on, and only for a rule on absence."""
    rule = parse_rule("eval absent_for 2h")
    assert find_absence(rule, 7199.0) is None
    breach = find_absence(rule, 7200.0)
    assert breach is not None
    assert (breach.step, breach.reason) == (None, "eval has had no value for 2h")
    assert find_absence(parse_rule("eval > 1"), 1e9) is None
