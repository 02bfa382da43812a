"""Silence: the usual pause of a run is learned from its posts; a much longer one makes it stale, then lost."""

from __future__ import annotations

from datetime import datetime, timedelta

from evalstop_service.domain.health import (
    LOST_TIMES,
    Liveness,
    check_liveness,
    measure_cadence,
    stale_after_seconds,
)
from hypothesis import example, given
from hypothesis import strategies as st

from tests.service.project_fixture import NOW

NEWEST_POSTS = 50

seconds = st.floats(0.001, 1e6)
optional_cadences = st.none() | seconds


def build_post_times(*pauses: float, begin: datetime = NOW) -> list[datetime]:
    """Build the times of posts with these pauses between them, in seconds."""
    moments = [begin]
    for pause in pauses:
        moments.append(moments[-1] + timedelta(seconds=pause))
    return moments


def test_cadence_is_the_second_longest_pause() -> None:
    """A long pause that occurs twice is usual; an outage, which occurs once, is not."""
    assert measure_cadence([build_post_times(*([1.0] * 20 + [600.0]) * 2, 30_000.0, 1.0)], NEWEST_POSTS) == 600


def test_few_posts_give_no_cadence() -> None:
    """A run with few posts is judged by its project's setting alone."""
    assert measure_cadence([build_post_times(5, 5, 5)], NEWEST_POSTS) is None
    assert measure_cadence([], NEWEST_POSTS) is None


def test_values_of_one_post_count_once() -> None:
    """Several values received at the same time are one post."""
    moments = build_post_times(60, 60, 60, 60)
    assert measure_cadence([moments * 5, moments], NEWEST_POSTS) == 60


def test_cadence_ignores_times_with_partial_data() -> None:
    """Where only the rarer metric's posts are loaded, the pauses between them are not the run's."""
    rare, frequent = (
        build_post_times(*[1000.0] * 20),
        build_post_times(*[1.0] * (NEWEST_POSTS - 1), begin=NOW + timedelta(seconds=20_000)),
    )
    assert measure_cadence([rare, frequent], NEWEST_POSTS) == 1


def test_cadence_begins_with_the_oldest_loaded_post() -> None:
    """All loaded posts of one metric count; those of several count from where all of them are loaded."""
    outer = build_post_times(9, 1, 1, 9)
    assert measure_cadence([outer], 5) == 9
    later = build_post_times(1, 1, 1, 1, begin=NOW + timedelta(seconds=100))
    assert measure_cadence([outer, later], 5) == 1


@given(st.lists(seconds, min_size=5, max_size=30), st.floats(0.5, 20), st.integers(-(10**6), 10**6), st.randoms())
def test_cadence_is_invariant_to_shift_and_order(pauses: list[float], scale: float, shift: int, random: object) -> None:
    """Scaled pauses scale the cadence; shifting times or shuffling posts does not change it."""
    cadence = measure_cadence([build_post_times(*pauses)], NEWEST_POSTS)
    scaled_posts = build_post_times(*(pause * scale for pause in pauses), begin=NOW + timedelta(seconds=shift))
    random.shuffle(scaled_posts)  # type: ignore[attr-defined]
    scaled_cadence = measure_cadence([scaled_posts], NEWEST_POSTS)
    assert cadence is not None
    assert scaled_cadence is not None
    assert abs(scaled_cadence - scale * cadence) <= 1e-4 * max(1.0, scale)


@given(st.lists(st.floats(1, 100), min_size=6, max_size=40), st.floats(0, 60))
def test_run_that_keeps_its_pace_is_alive(pauses: list[float], stale_seconds: float) -> None:
    """A pause below three times the second-longest one does not make a run stale."""
    sorted_pauses = sorted(pauses)
    cadence = measure_cadence([build_post_times(*pauses)], NEWEST_POSTS)
    assert cadence is not None
    assert check_liveness(2.9 * sorted_pauses[-2], None, stale_seconds, cadence)[0] is Liveness.ALIVE


@example(silence=10.0, stale_for=110.0, stale_seconds=10.0, cadence=None)  # lost from the limit on
@given(silence=seconds, stale_for=st.none() | seconds, stale_seconds=seconds, cadence=optional_cadences)
def test_run_is_stale_before_it_is_lost(
    silence: float, stale_for: float | None, stale_seconds: float, cadence: float | None
) -> None:
    """Only a run that has been stale is lost, and the next check is due when its state can change."""
    limit = stale_after_seconds(stale_seconds, cadence)
    liveness = check_liveness(silence, stale_for, stale_seconds, cadence)[0]
    assert limit >= stale_seconds
    assert (liveness is Liveness.ALIVE) == (silence < limit)
    assert (liveness is Liveness.LOST) == (
        silence >= limit and stale_for is not None and stale_for >= LOST_TIMES * limit
    )
    if liveness is not Liveness.LOST:
        wait = check_liveness(silence, stale_for, stale_seconds, cadence)[1]
        assert 1 <= wait <= max(1, limit)
        later = wait * (1 + 1e-9) + 1e-6
        if liveness is Liveness.ALIVE:
            assert check_liveness(silence + later, None, stale_seconds, cadence)[0] is Liveness.STALE


@given(stale_seconds=st.floats(1, 1e4), cadence=optional_cadences)
def test_silent_run_is_lost_after_twelve_limits(stale_seconds: float, cadence: float | None) -> None:
    """A silent run becomes stale once and is lost after twelve times its limit, by default an hour."""
    limit, silence, since, checks = stale_after_seconds(stale_seconds, cadence), 0.0, None, 0
    while (
        liveness := check_liveness(silence, compute_stale_seconds(silence, since), stale_seconds, cadence)[0]
    ) is not Liveness.LOST:
        since = silence if liveness is Liveness.STALE and since is None else since
        silence += check_liveness(silence, compute_stale_seconds(silence, since), stale_seconds, cadence)[1]
        checks += 1
        assert checks < 20
    assert 12 * limit * (1 - 1e-9) <= silence <= 12 * limit + 2


def compute_stale_seconds(silence: float, since: float | None) -> float | None:
    return None if since is None else silence - since
