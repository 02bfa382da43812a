"""Retry delays, and the result of an attempt by its answer."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from evalstop_service.store.queue.attempts import Dead, Delivered, Retry
from evalstop_service.webhooks.retry import REJECTIONS, Answer, Backoff, judge_answer
from hypothesis import given
from hypothesis import strategies as st

NOW = datetime(2026, 1, 1, tzinfo=UTC)
chances = st.floats(0, 1, exclude_max=True)
backoffs = st.builds(
    lambda first, more, most: Backoff(first, first + more, most),
    st.floats(0.001, 100),
    st.floats(0, 10_000),
    st.integers(1, 1000),
)


def build_answer(code: int | None) -> Answer:
    return Answer(code, None, 1.0)


@given(backoff=backoffs, attempts=st.integers(1, 10_000), chance=chances)
def test_delay_stays_within_bounds(backoff: Backoff, attempts: int, chance: float) -> None:
    """A delay is never shorter than half the first one and never longer than the cap."""
    assert backoff.first_seconds / 2 <= backoff.seconds(attempts, chance) <= backoff.cap_seconds


def test_delays_double_up_to_the_cap() -> None:
    """Without jitter and with a cap of 5 s the delays are 1, 2, 4, 5, 5 s."""
    backoff = Backoff(first_seconds=1, cap_seconds=5)
    assert [2 * backoff.seconds(attempts, 0) for attempts in range(1, 6)] == [1, 2, 4, 5, 5]


@given(code=st.integers(200, 299), attempts=st.integers(1, 1000))
def test_any_2xx_is_delivered(code: int, attempts: int) -> None:
    """Every 2xx means delivered, even on the last attempt."""
    assert judge_answer(build_answer(code), attempts, NOW, 0, Backoff()) == Delivered()


@pytest.mark.parametrize("code", [300, 301, 302, 303, 307, 308, 400, 413, 415, 422, 550, 554])
def test_redirects_and_rejections_are_final(code: int) -> None:
    """Redirects and rejections of the event end the delivery and leave the endpoint enabled."""
    result = judge_answer(build_answer(code), 1, NOW, 0, Backoff())
    assert isinstance(result, Dead)
    assert not result.gone


def test_status_410_disables_the_endpoint() -> None:
    """410 ends the delivery and disables the endpoint."""
    result = judge_answer(build_answer(410), 1, NOW, 0, Backoff())
    assert isinstance(result, Dead)
    assert result.gone


@given(code=st.integers(100, 999) | st.none(), chance=chances, backoff=backoffs)
def test_other_answers_are_retried(code: int | None, chance: float, backoff: Backoff) -> None:
    """Any other answer is retried later, unless it was the last attempt."""
    if code is not None and (200 <= code < 400 or code == 410 or code in REJECTIONS):
        return
    last = judge_answer(build_answer(code), backoff.max_attempts, NOW, chance, backoff)
    assert isinstance(last, Dead)
    assert not last.gone
    if backoff.max_attempts > 1:
        result = judge_answer(build_answer(code), backoff.max_attempts - 1, NOW, chance, backoff)
        assert isinstance(result, Retry)
        assert NOW < result.due_at <= NOW + timedelta(seconds=backoff.cap_seconds)
