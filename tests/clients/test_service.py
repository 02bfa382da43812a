"""How the client classifies answers, and how long it waits before a retry."""

from __future__ import annotations

import os
import subprocess
import sys

import httpx
import pytest
from evalstop_client.service import (
    LONGEST_ASKED_SECONDS,
    LONGEST_SECONDS,
    Accepted,
    Refused,
    Service,
    Unauthorized,
    Unavailable,
    understand,
    wait_seconds,
)
from hypothesis import given
from hypothesis import strategies as st

from tests.clients.fake_service import KEY, FakeServer

PROBLEM = {"content-type": "application/problem+json"}
REQUEST = httpx.Request("POST", "http://evalstop/api/v1/runs")


def make_response(status: int, text: str = "", headers: dict[str, str] | None = None) -> httpx.Response:
    return httpx.Response(status, text=text, headers=headers, request=REQUEST)


@pytest.mark.parametrize(
    ("statuses", "text", "headers", "expected"),
    [
        pytest.param([200, 201], "{}", {}, Accepted, id="a JSON object with a 2xx status is accepted"),
        pytest.param([400, 404, 409, 422], '{"title": "no"}', PROBLEM, Refused, id="a problem document is final"),
        pytest.param([400, 404, 409, 422], "<html>", {}, Unavailable, id="a proxy's 4xx is retried"),
        pytest.param([408, 425, 429, 500, 503, 504, 302], "{}", PROBLEM, Unavailable, id="overload is retried"),
        pytest.param([413], "<html>", {}, Refused, id="only a smaller batch can succeed, whoever says so"),
        pytest.param([401, 403], '{"title": "no"}', PROBLEM, Unauthorized, id="a person has to replace the key"),
        pytest.param([401, 403], "<html>no", {}, Unavailable, id="a proxy's refusal says nothing of the key"),
    ],
)
def test_answers_are_understood(
    statuses: list[int], text: str, headers: dict[str, str], expected: type[object]
) -> None:
    """What a status means to the client depends on whether the service or a proxy answered."""
    assert {type(understand(make_response(status, text, headers))) for status in statuses} == {expected}


@pytest.mark.parametrize("text", ["", "<html>hello</html>", "[]", "1", "[" * 100_000])
def test_success_without_a_json_object_is_unavailable(text: str) -> None:
    """A login page that answers 200 to everything must not swallow observations."""
    assert isinstance(understand(make_response(200, text)), Unavailable)


def test_refusal_has_title_and_pointers() -> None:
    """A refusal has the problem's title and pointers, without its detail; malformed errors are skipped."""
    text = '{"title": "T", "detail": "D", "errors": [{"pointer": "/observations/3/step", "detail": "x"}, 7, {}]}'
    answer = understand(make_response(422, text, PROBLEM))
    assert isinstance(answer, Refused)
    assert answer.pointers == ("/observations/3/step",)
    assert answer.reason.endswith(": T; /observations/3/step: x")


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("7", 7.0), ("0", 0.0), ("-3", 0.0), ("nan", 0.0), ("soon", None), ("Thu, 01 Jan 1970 00:00:00 GMT", None)],
)
def test_retry_after_is_parsed(header: str, seconds: float | None) -> None:
    """Retry-After is a number of seconds; anything else is ignored."""
    answer = understand(make_response(429, "{}", {"retry-after": header}))
    assert isinstance(answer, Unavailable)
    assert answer.retry_after_seconds == seconds


def test_refused_connection_is_unavailable() -> None:
    """A refused connection is returned as an answer, not raised."""
    service = Service("http://127.0.0.1:1", "esk_x")
    assert isinstance(service.get("/runs"), Unavailable)
    service.close()


@pytest.mark.parametrize("proxy", ["socks5://127.0.0.1:1", "gopher://127.0.0.1:1", "no-port:abc"])
def test_unusable_proxy_is_unavailable(monkeypatch: pytest.MonkeyPatch, proxy: str) -> None:
    """A proxy in the environment that cannot be used is returned as an answer that says why, not raised."""
    monkeypatch.setenv("ALL_PROXY", proxy)
    answer = Service("http://evalstop.example", "esk_x").get("/runs")
    assert isinstance(answer, Unavailable)


@pytest.mark.parametrize("host", ["evalstop..example", "a" * 64 + ".example"])
def test_host_that_is_no_name_is_unavailable(host: str) -> None:
    """A host that cannot be looked up is returned as an answer, not raised."""
    assert isinstance(Service(f"http://{host}", "esk_x").get("/runs"), Unavailable)


def test_stale_certificate_file_matters_to_https_only(server: FakeServer) -> None:
    """A certificate file that no longer exists does not stop plain HTTP; the error of HTTPS names it."""
    script = (
        "import sys; from evalstop_client.service import Service\n"
        "for url in sys.argv[1:]: print(Service(url, sys.argv[1]).get('/key'))"
    )
    environment = {**os.environ, "SSL_CERT_FILE": "/nonexistent/ca.pem"}
    command = [sys.executable, "-c", script, server.url, "https://127.0.0.1:1"]
    lines = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line.partition("(")[0] for line in lines] == ["Unauthorized", "Unavailable"]
    assert "certificates of SSL_CERT_FILE=/nonexistent/ca.pem" in lines[1]


def test_service_on_this_machine_is_reached_without_proxy(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy in the environment is for other machines: it cannot reach a service on this one."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    service = Service(server.url, KEY)
    assert isinstance(service.get("/key"), Accepted)
    service.close()


@given(st.integers(1, 10**6), st.floats(0, 1, exclude_max=True), st.none() | st.floats(0, allow_infinity=True))
def test_waits_are_bounded_and_respect_retry_after(failures: int, chance: float, retry_after: float | None) -> None:
    """A wait is positive, bounded, grows with failures, and is not shorter than a Retry-After within the bound."""
    seconds = wait_seconds(failures, chance, retry_after)
    assert 0 < seconds <= max(LONGEST_SECONDS, LONGEST_ASKED_SECONDS)
    assert retry_after is None or seconds >= min(retry_after, LONGEST_ASKED_SECONDS)
    assert retry_after is not None or seconds <= LONGEST_SECONDS
    assert wait_seconds(failures + 1, chance) >= wait_seconds(failures, chance)
