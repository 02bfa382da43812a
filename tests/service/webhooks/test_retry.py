"""The laws of waiting and of judging an answer."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from evalstop_service.store.queue.attempts import Dead, Delivered, Retry
from evalstop_service.webhooks.retry import REJECTIONS, Answer, Backoff, judge_answer
from hypothesis import given
from hypothesis import strategies as st

NOW = datetime(2026, 1, 1, tzinfo=UTC)
chances = st.floats(0, 1, exclude_max=True)
backoffs = st.builds(
    lambda first, factor, more, most: Backoff(first, factor, first + more, most),
    st.floats(0.001, 100),
    st.floats(1, 10),
    st.floats(0, 10_000),
    st.integers(1, 1000),
)


def answer(code: int | None, retry_after: str | None = None) -> Answer:
    return Answer(code, None, retry_after, 1.0)


@given(backoff=backoffs, attempts=st.integers(1, 10_000), chance=chances)
def test_stays_within_bounds(backoff: Backoff, attempts: int, chance: float) -> None:
    """A wait is never shorter than half the first one and never longer than the cap."""
    assert backoff.first_seconds / 2 <= backoff.seconds(attempts, chance) <= backoff.cap_seconds


@given(backoff=backoffs, attempts=st.integers(1, 200), chance=chances)
def test_never_shrinks(backoff: Backoff, attempts: int, chance: float) -> None:
    """With the same luck, each wait is at least as long as the one before."""
    assert backoff.seconds(attempts, chance) <= backoff.seconds(attempts + 1, chance)


@given(attempts=st.integers(1, 200), one=chances, other=chances)
def test_luck_is_ordered(attempts: int, one: float, other: float) -> None:
    """Jitter spreads waits over the upper half, in the order of the chances drawn."""
    low, high = sorted((one, other))
    assert Backoff().seconds(attempts, low) <= Backoff().seconds(attempts, high) <= 2 * Backoff().seconds(attempts, 0)


def test_doubles() -> None:
    """The waits double up to the cap."""
    backoff = Backoff(first_seconds=1, factor=2, cap_seconds=5)
    assert [2 * backoff.seconds(attempts, 0) for attempts in range(1, 6)] == [1, 2, 4, 5, 5]


@given(code=st.integers(200, 299), attempts=st.integers(1, 1000))
def test_any_2xx_delivers(code: int, attempts: int) -> None:
    """Every 2xx means delivered, even on the last attempt."""
    assert judge_answer(answer(code), attempts, NOW, 0, Backoff()) == Delivered()


@pytest.mark.parametrize("code", [300, 301, 302, 303, 307, 308, 400, 413, 415, 422, 550, 554])
def test_hopeless_answers_kill(code: int) -> None:
    """Redirects, and refusals of the event itself, end the delivery and leave the endpoint on."""
    result = judge_answer(answer(code), 1, NOW, 0, Backoff())
    assert isinstance(result, Dead)
    assert not result.gone


def test_gone_disables() -> None:
    """410 ends the delivery and takes the endpoint out of service."""
    result = judge_answer(answer(410), 1, NOW, 0, Backoff())
    assert isinstance(result, Dead)
    assert result.gone


@given(code=st.integers(100, 999) | st.none(), chance=chances, backoff=backoffs)
def test_everything_else_is_tried_again(code: int | None, chance: float, backoff: Backoff) -> None:
    """Whatever is neither a success nor hopeless is tried again later, unless it was the last attempt."""
    if code is not None and (200 <= code < 400 or code == 410 or code in REJECTIONS):
        return
    last = judge_answer(answer(code), backoff.max_attempts, NOW, chance, backoff)
    assert isinstance(last, Dead)
    assert not last.gone
    if backoff.max_attempts > 1:
        result = judge_answer(answer(code), backoff.max_attempts - 1, NOW, chance, backoff)
        assert isinstance(result, Retry)
        assert NOW < result.due_at <= NOW + timedelta(seconds=backoff.cap_seconds)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("30", 30),
        (" 30 ", 30),
        (format_datetime(NOW + timedelta(seconds=30), usegmt=True), 30),
        ("0", 1),
        ("-30", 1),
        ("soon", 1),
        ("", 1),
        ("Thu, 01 Jan 1970 00:00:00 GMT", 1),
        ("9" * 5000, 900),
        ("Fri, 31 Dec 9999 23:59:59 GMT", 900),
    ],
)
def test_retry_after(value: str, seconds: float) -> None:
    """`Retry-After`, a number or a date, lengthens the wait up to the cap; nonsense and the past change nothing."""
    result = judge_answer(answer(503, value), 1, NOW, 0.9999999, Backoff(first_seconds=1, cap_seconds=900))
    assert isinstance(result, Retry)
    assert (result.due_at - NOW).total_seconds() == pytest.approx(seconds)


@given(value=st.text(), code=st.sampled_from([429, 503]))
def test_survives_any_retry_after(value: str, code: int) -> None:
    """No `Retry-After` that anyone can send breaks the judgment or its bounds."""
    result = judge_answer(answer(code, value), 1, NOW, 0, Backoff())
    assert isinstance(result, Retry)
    assert NOW < result.due_at <= NOW + timedelta(seconds=Backoff().cap_seconds)


@pytest.mark.parametrize(
    "settings",
    [
        {"first_seconds": 0},
        {"factor": 0.5},
        {"cap_seconds": 0.1},
        {"max_attempts": 0},
        {"first_seconds": float("nan")},
    ],
)
def test_refuses_nonsense(settings: dict[str, float]) -> None:
    """A backoff that could not work cannot be made."""
    with pytest.raises(ValueError, match=r"backoff needs|max_attempts"):
        Backoff(**settings)  # type: ignore[arg-type]
