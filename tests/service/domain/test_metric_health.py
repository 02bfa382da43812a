"""Health of runs: silence is told from a usual pause, and faulty metrics from slow, coarse or late ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import pairwise

import pytest
from evalstop_service.domain.health import (
    LOST_TIMES,
    NEWEST,
    Liveness,
    MetricFault,
    Reading,
    RunProgress,
    check_liveness,
    find_fault,
    measure_cadence,
    select_new_faults,
    stale_after_seconds,
)
from hypothesis import example, given
from hypothesis import strategies as st

from tests.service.project_fixture import NOW


def build_progress(seconds: float) -> RunProgress:
    return RunProgress(NOW, NOW + timedelta(seconds=seconds), int(seconds))


def build_readings(
    count: int = 10, *, steps: float = 100, seconds: float = 100, late_seconds: float = 0
) -> list[Reading]:
    """Build readings at even steps and times, received `late_seconds` later."""
    return [
        Reading(int(index * steps), NOW + timedelta(seconds=index * seconds + late_seconds))
        for index in range(1, count + 1)
    ][-NEWEST:]


def is_faulty(newest: Sequence[Reading], progress: RunProgress, *, declared: bool = True) -> bool:
    return find_fault("eval", newest, progress, required=declared) is not None


def test_metric_has_ceased_after_five_gaps() -> None:
    """A metric has ceased, for example by renaming, after five gaps in which others reported."""
    assert not is_faulty(build_readings(), build_progress(1500))
    assert is_faulty(build_readings(), build_progress(1501))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_metric_with_few_values_has_ceased_after_ten_gaps(count: int) -> None:
    """With at most three values little is known of a metric's pace, so ten gaps must pass."""
    newest = build_readings(count)
    assert not is_faulty(newest, build_progress(100 * count + 1000))
    assert is_faulty(newest, build_progress(100 * count + 1001))


def test_late_evals_have_not_ceased() -> None:
    """Evals computed elsewhere may be far behind in steps while they arrive regularly."""
    ahead = replace(build_progress(60_100), last_step=60_100)
    assert not is_faulty(build_readings(late_seconds=59_000), ahead)


def test_pause_of_the_run_is_no_fault() -> None:
    """When the whole run pauses, no metric has ceased."""
    assert not is_faulty(build_readings(), replace(build_progress(1050), reported_at=NOW + timedelta(days=3)))


def test_evals_at_doubling_steps_have_not_ceased() -> None:
    """Gaps may double: the next one is as long as all before together."""
    newest = [Reading(2**index, NOW + timedelta(seconds=2**index)) for index in range(12)]
    assert not is_faulty(newest, build_progress(2**12 - 1))


def test_values_of_one_post_count_as_one_gap() -> None:
    """A log that is sent once an hour has gaps of an hour."""
    newest = [replace_time(reading, 3600) for reading in build_readings(40, steps=10)]
    assert not is_faulty(newest, build_progress(7000))
    assert is_faulty(newest, build_progress(3600 + 5 * 3600 + 1))


def replace_time(reading: Reading, seconds: float) -> Reading:
    return reading._replace(received_at=NOW + timedelta(seconds=seconds))


def test_absent_metric_is_missing_after_a_while() -> None:
    """An absent metric is missing after a third of the planned steps, or after six hours without a plan."""
    planned = replace(build_progress(300), total_steps=900)
    assert not is_faulty([], replace(planned, last_step=299))
    assert is_faulty([], planned)
    assert not is_faulty([], build_progress(6 * 3600 - 1))
    assert is_faulty([], build_progress(6 * 3600))


def test_undeclared_metric_is_not_missing() -> None:
    """A metric with a role by default need not appear; once it did, it can cease."""
    assert not is_faulty([], build_progress(10**6), declared=False)
    assert is_faulty(build_readings(), build_progress(10**6), declared=False)


def test_known_fault_is_not_new() -> None:
    """A fault of a metric that had one is not new, whatever its reason now."""
    new = MetricFault("b", "y")
    assert select_new_faults([MetricFault("a", "x")], [MetricFault("a", "z"), new]) == [new]


@st.composite
def draw_healthy_metric(draw: st.DrawFn) -> tuple[list[Reading], RunProgress]:
    """Draw a metric with a jittery pace, and a run on its way to the next value."""
    count = draw(st.integers(1, 60))
    step_gap, second_gap = draw(st.integers(1, 10_000)), draw(st.floats(0.01, 10_000))
    step, moment, drawn_readings = 0, 0.0, []
    for _ in range(count):
        jitter = draw(st.floats(1, 2))
        step += max(1, int(step_gap * jitter))
        moment += second_gap * jitter
        drawn_readings.append(Reading(step, NOW + timedelta(seconds=moment)))
    next_in = draw(st.floats(0, 2))
    reported_at = NOW + timedelta(seconds=moment + second_gap * next_in)
    return drawn_readings[-NEWEST:], RunProgress(NOW, reported_at, step + int(step_gap * next_in))


@given(draw_healthy_metric())
def test_a_healthy_metric_has_no_fault(run: tuple[list[Reading], RunProgress]) -> None:
    """Whatever its pace, and with a jitter of half of it, a healthy metric has no fault."""
    newest, progress = run
    assert not is_faulty(newest, progress)


@given(draw_healthy_metric(), st.integers(11, 1000))
def test_ceased_metric_is_found(run: tuple[list[Reading], RunProgress], gaps: int) -> None:
    """After eleven of its longest gaps in steps and time, any metric has ceased."""
    newest, progress = run
    steps = max([b.step - a.step for a, b in pairwise(newest)] or [newest[0].step])
    moments = [reading.received_at for reading in newest]
    longest = max([b - a for a, b in pairwise(moments)] or [moments[0] - NOW])
    later = replace(progress, last_step=newest[-1].step + gaps * steps, reported_at=moments[-1] + gaps * longest)
    assert is_faulty(newest, later)


@given(draw_healthy_metric(), st.integers(-(10**6), 10**6))
def test_faults_do_not_depend_on_the_clock(run: tuple[list[Reading], RunProgress], shift: int) -> None:
    """Shifted times give the same faults."""
    newest, progress = run
    time_shift = timedelta(seconds=shift)
    shifted_readings = [Reading(step, moment + time_shift) for step, moment in newest]
    shifted_progress = replace(
        progress, begun_at=progress.begun_at + time_shift, reported_at=progress.reported_at + time_shift
    )
    assert is_faulty(shifted_readings, shifted_progress) == is_faulty(newest, progress)


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
