"""Rules on metrics: what they mean, whatever the values are."""

from __future__ import annotations

import math
import re
import statistics

import pytest
from evalstop_service.domain.metric_rules import PATTERN, Point, find_absence, find_breach, parse_rule
from hypothesis import given
from hypothesis import strategies as st

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
