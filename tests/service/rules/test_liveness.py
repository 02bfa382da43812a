"""Silence: what is usual for a run is learnt from its own posts, and what is longer makes it stale, then lost."""

from __future__ import annotations

from datetime import datetime, timedelta

from evalstop_service.rules.liveness import (
    LOST_TIMES,
    Liveness,
    assess_liveness,
    measure_cadence,
    seconds_until_check,
    stale_after_seconds,
)
from hypothesis import given
from hypothesis import strategies as st

from tests.service.project_fixture import NOW

MOST = 50

seconds = st.floats(0.001, 1e6)
cadences = st.none() | seconds


def posts(*pauses: float, begin: datetime = NOW) -> list[datetime]:
    """The moments of posts with these pauses in seconds between them."""
    moments = [begin]
    for pause in pauses:
        moments.append(moments[-1] + timedelta(seconds=pause))
    return moments


def test_the_longest_pause_that_was_made_twice_is_the_cadence() -> None:
    """A long eval every now and then is a habit; an outage, which came once, is none."""
    assert measure_cadence([posts(*([1.0] * 20 + [600.0]) * 2, 30_000.0, 1.0)], MOST) == 600


def test_few_posts_tell_no_cadence() -> None:
    """A run that has hardly begun is judged by its project alone."""
    assert measure_cadence([posts(5, 5, 5)], MOST) is None
    assert measure_cadence([], MOST) is None


def test_values_of_one_post_are_one_post() -> None:
    """Many values of several metrics that came together tell of one moment."""
    moments = posts(60, 60, 60, 60)
    assert measure_cadence([moments * 5, moments], MOST) == 60


def test_the_time_before_a_metric_is_fully_known_is_left_out() -> None:
    """Where only the rarer metric's posts are known, the pauses between them are no pauses of the run."""
    rare, frequent = posts(*[1000.0] * 20), posts(*[1.0] * (MOST - 1), begin=NOW + timedelta(seconds=20_000))
    assert measure_cadence([rare, frequent], MOST) == 1


@given(st.lists(seconds, min_size=5, max_size=30), st.floats(0.5, 20), st.integers(-(10**6), 10**6), st.randoms())
def test_the_cadence_keeps_with_scale_shift_and_order(
    pauses: list[float], scale: float, shift: int, random: object
) -> None:
    """Twice as slow is twice the cadence, whenever it was and in whatever order it is told."""
    found = measure_cadence([posts(*pauses)], MOST)
    moved = posts(*(pause * scale for pause in pauses), begin=NOW + timedelta(seconds=shift))
    random.shuffle(moved)  # type: ignore[attr-defined]
    again = measure_cadence([moved], MOST)
    assert found is not None
    assert again is not None
    assert abs(again - scale * found) <= 1e-4 * max(1.0, scale)


@given(st.lists(st.floats(1, 100), min_size=6, max_size=40), st.floats(0, 60))
def test_a_run_that_keeps_its_pace_is_never_stale(pauses: list[float], stale_seconds: float) -> None:
    """While no pause is three times as long as one that was made twice before, nobody is alarmed."""
    known = sorted(pauses)
    usual = measure_cadence([posts(*pauses)], MOST)
    assert usual is not None
    assert assess_liveness(2.9 * known[-2], None, stale_seconds, usual) is Liveness.ALIVE


@given(silence=seconds, stale_for=st.none() | seconds, stale_seconds=seconds, known=cadences)
def test_a_run_is_stale_before_it_is_lost_and_never_before_its_project_says(
    silence: float, stale_for: float | None, stale_seconds: float, known: float | None
) -> None:
    """Only one that is known to be stale is lost, and the next look comes when something may have changed."""
    limit, pulse = stale_after_seconds(stale_seconds, known), assess_liveness(silence, stale_for, stale_seconds, known)
    assert limit >= stale_seconds
    assert (pulse is Liveness.ALIVE) == (silence < limit)
    assert (pulse is Liveness.LOST) == (silence >= limit and stale_for is not None and stale_for >= LOST_TIMES * limit)
    if pulse is not Liveness.LOST:
        wait = seconds_until_check(silence, stale_for, stale_seconds, known)
        assert 1 <= wait <= max(1, limit)
        later = wait * (1 + 1e-9) + 1e-6
        if pulse is Liveness.ALIVE:
            assert assess_liveness(silence + later, None, stale_seconds, known) is Liveness.STALE


@given(stale_seconds=st.floats(1, 1e4), known=cadences)
def test_a_run_that_stays_silent_is_lost_after_twelve_times_its_limit(
    stale_seconds: float, known: float | None
) -> None:
    """From look to look it turns stale once and is lost in the end, an hour later where nothing else is said."""
    limit, silence, since, looks = stale_after_seconds(stale_seconds, known), 0.0, None, 0
    while (pulse := assess_liveness(silence, stale_for(silence, since), stale_seconds, known)) is not Liveness.LOST:
        since = silence if pulse is Liveness.STALE and since is None else since
        silence += seconds_until_check(silence, stale_for(silence, since), stale_seconds, known)
        looks += 1
        assert looks < 20
    assert 12 * limit * (1 - 1e-9) <= silence <= 12 * limit + 2


def stale_for(silence: float, since: float | None) -> float | None:
    return None if since is None else silence - since
