"""What the client makes of answers and of time: refusals believed only in the service's words, waits bounded."""

from __future__ import annotations

import httpx
import pytest
from evalstop_client.backoff import LONGEST_ASKED_SECONDS, LONGEST_SECONDS, wait_seconds
from evalstop_client.service import Accepted, Refused, Service, Unauthorized, Unavailable, understand
from hypothesis import given
from hypothesis import strategies as st

PROBLEM = {"content-type": "application/problem+json"}
REQUEST = httpx.Request("POST", "http://evalstop/api/v1/runs")


def response(status: int, text: str = "", headers: dict[str, str] | None = None) -> httpx.Response:
    return httpx.Response(status, text=text, headers=headers, request=REQUEST)


def test_an_object_is_an_answer() -> None:
    """A JSON object with a 2xx status is what was hoped for."""
    assert understand(response(201, '{"id": "1"}')) == Accepted({"id": "1"})


@pytest.mark.parametrize("text", ["", "<html>hello</html>", "[]", "1", "[" * 100_000])
def test_success_in_foreign_words_is_absence(text: str) -> None:
    """A login page answering 200 to everything must not swallow the observations."""
    assert isinstance(understand(response(200, text)), Unavailable)


@pytest.mark.parametrize("status", [400, 404, 409, 422])
def test_a_refusal_counts_only_as_a_problem_document(status: int) -> None:
    """The service's own refusal is final; that of a proxy in between is a way of being away."""
    assert isinstance(understand(response(status, '{"title": "no"}', PROBLEM)), Refused)
    assert isinstance(understand(response(status, "<html>default backend</html>")), Unavailable)


def test_a_refusal_tells_its_words_and_places() -> None:
    """Title and pointers of a problem document are kept, not the detail, which counts them; nonsense is passed over."""
    text = '{"title": "T", "detail": "D", "errors": [{"pointer": "/observations/3/step", "detail": "x"}, 7, {}]}'
    answer = understand(response(422, text, PROBLEM))
    assert isinstance(answer, Refused)
    assert answer.pointers == ("/observations/3/step",)
    assert answer.reason.endswith(": T; /observations/3/step: x")


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504, 302])
def test_passing_trouble_is_absence(status: int) -> None:
    """Overload, faults and redirects are waited out."""
    assert isinstance(understand(response(status, "{}", PROBLEM)), Unavailable)


def test_too_large_is_a_refusal_whoever_says_it() -> None:
    """413 by a proxy will not pass with time: the batch has to be made smaller."""
    assert isinstance(understand(response(413, "<html>")), Refused)


@pytest.mark.parametrize("status", [401, 403])
def test_a_bad_key_is_told_apart(status: int) -> None:
    """Only a person can mend a key."""
    assert isinstance(understand(response(status)), Unauthorized)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("7", 7.0), ("0", 0.0), ("-3", 0.0), ("nan", 0.0), ("soon", None), ("Thu, 01 Jan 1970 00:00:00 GMT", 0.0)],
)
def test_retry_after_is_read_in_both_forms(header: str, seconds: float | None) -> None:
    """Retry-After as a number or a date is honored; what is neither is passed over."""
    answer = understand(response(429, "{}", {"retry-after": header}))
    assert isinstance(answer, Unavailable)
    assert answer.retry_after_seconds == seconds


def test_nobody_there_is_absence() -> None:
    """A refused connection is an answer like any other, not an exception."""
    service = Service("http://127.0.0.1:1", "esk_x")
    assert isinstance(service.get("/runs"), Unavailable)
    service.close()


@given(st.integers(1, 10**6), st.floats(0, 1, exclude_max=True), st.none() | st.floats(0, allow_infinity=True))
def test_waits_are_bounded_and_honor_what_was_asked(failures: int, chance: float, asked: float | None) -> None:
    """A wait is positive, never above the bounds, and not below what the service asked for within them."""
    seconds = wait_seconds(failures, chance, asked)
    assert 0 < seconds <= max(LONGEST_SECONDS, LONGEST_ASKED_SECONDS)
    assert asked is None or seconds >= min(asked, LONGEST_ASKED_SECONDS)
    assert asked is not None or seconds <= LONGEST_SECONDS
    assert wait_seconds(failures + 1, chance) >= wait_seconds(failures, chance)
