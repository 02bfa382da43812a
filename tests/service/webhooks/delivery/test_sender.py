"""The sender against misbehaving endpoints: every attempt ends in time with a result."""

from __future__ import annotations

import asyncio
import gzip
import socket
import threading
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler
from urllib.parse import urlsplit

import pytest
from evalstop_service.store.queue.attempts import Dead, Delivered, Retry
from evalstop_service.webhooks.delivery.send import Sender
from evalstop_service.webhooks.retry import REJECTIONS, Answer, Backoff, judge_answer
from hypothesis import given
from hypothesis import strategies as st

from tests.service.webhooks.delivery.fakes import LOOPBACK, Behavior, FakeEndpoint, Reply, reserve_closed_port


def send(url: str, times: int = 1, timeout_seconds: float = 20.0, body: bytes = b"{}") -> Answer:
    """Send the same body `times` over one session; return the last answer."""

    async def run() -> Answer:
        async with Sender(timeout_seconds, timeout_seconds, address_policy=LOOPBACK) as sender:
            for _ in range(times - 1):
                await sender.send(url, {"webhook-id": "msg_1"}, body)
            return await sender.send(url, {"webhook-id": "msg_1"}, body)

    return asyncio.run(run())


def write_raw(*parts: bytes, keep_open_until: threading.Event | None = None) -> Behavior:
    """Build a behavior that writes raw bytes, then keeps the connection open until the event is set."""

    def behavior(request: BaseHTTPRequestHandler, _number: int) -> None:
        for part in parts:
            request.wfile.write(part)
        if keep_open_until is not None:
            keep_open_until.wait(30)

    return behavior


def test_body_and_headers_arrive_unchanged() -> None:
    """The body arrives byte for byte as JSON, with the given headers."""
    with FakeEndpoint(Reply(204)) as endpoint:
        answer = send(endpoint.url, body='{"name":"né"}'.encode())
    (received,) = endpoint.received
    assert (answer.status_code, answer.error) == (204, None)
    assert received.body == '{"name":"né"}'.encode()
    assert received.headers["content-type"] == "application/json"
    assert received.headers["webhook-id"] == "msg_1"
    assert answer.duration_ms > 0


def test_connection_is_reused() -> None:
    """Several events to one endpoint share a connection."""
    ports: set[int] = set()

    def behavior(request: BaseHTTPRequestHandler, _number: int) -> Reply:
        ports.add(request.client_address[1])
        return Reply(200, body=b"thanks")

    with FakeEndpoint(behavior) as endpoint:
        send(endpoint.url, times=3)
    assert len(endpoint.received) == 3
    assert len(ports) == 1


@pytest.mark.parametrize("body", [b"<!DOCTYPE html>\n<title>Sign in</title>", b"\n <html><body>", b"<b>ok</b>"])
def test_web_page_is_no_receipt(body: bytes) -> None:
    """The page of a sign-in proxy is no receipt although its status is 200; the attempt is repeated."""
    with FakeEndpoint(Reply(200, {"Content-Type": "text/html"}, body)) as endpoint:
        answer = send(endpoint.url)
    is_page = b"ok" not in body
    assert (answer.status_code, answer.is_accepted) == (200, not is_page)
    result = judge_answer(answer, 1, datetime(2026, 1, 1, tzinfo=UTC), 0, Backoff())
    assert isinstance(result, Retry if is_page else Delivered)
    assert ("a web page" in (answer.error or "")) is is_page


def test_error_answer_is_shortened_and_printable() -> None:
    """An error quotes the start of the body in one printable line."""
    reply = Reply(503, {}, b"down\0for\r\n maintenance \xff" + b"x" * 5000)
    with FakeEndpoint(reply) as endpoint:
        answer = send(endpoint.url)
    assert answer.status_code == 503
    assert answer.error is not None
    assert answer.error.startswith("HTTP 503: down for maintenance")
    assert answer.error.isprintable()
    assert len(answer.error) < 400


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirect_is_not_followed(status: int) -> None:
    """A redirect is an answer: its target is never requested."""
    with FakeEndpoint(Reply()) as target, FakeEndpoint(Reply(status, {"Location": target.url})) as endpoint:
        answer = send(endpoint.url)
    assert answer.status_code == status
    assert target.received == []


def test_silent_endpoint_times_out() -> None:
    """An endpoint that accepts the event and never answers ends in a timeout."""
    with FakeEndpoint(write_raw()) as endpoint:
        endpoint.behavior = write_raw(keep_open_until=endpoint.released)
        answer = send(endpoint.url, timeout_seconds=0.3)
    assert answer.status_code is None
    assert answer.error == "no answer within 0.3 s"


def test_unread_body_times_out() -> None:
    """An endpoint that accepts the connection and never reads ends in a timeout, too."""
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        answer = send(f"http://127.0.0.1:{listening.getsockname()[1]}/", timeout_seconds=0.3, body=b"x" * 1_000_000)
    assert (answer.status_code, answer.error) == (None, "no answer within 0.3 s")


def test_slow_headers_time_out() -> None:
    """Headers that keep arriving do not extend the timeout."""
    stop = threading.Event()

    def write_headers_slowly(request: BaseHTTPRequestHandler, _number: int) -> None:
        request.wfile.write(b"HTTP/1.1 200 OK\r\n")
        while not stop.wait(0.02):
            request.wfile.write(b"X-Drip: 1\r\n")

    with FakeEndpoint(write_headers_slowly) as endpoint:
        answer = send(endpoint.url, timeout_seconds=0.4)
        stop.set()
    assert (answer.status_code, answer.error) == (None, "no answer within 0.4 s")


@pytest.mark.parametrize(("status", "error"), [(b"200 OK", None), (b"500 No", "HTTP 500: x")])
def test_status_line_is_enough(status: bytes, error: str | None) -> None:
    """The status counts once it has arrived; the sender does not wait for the rest of the body."""
    with FakeEndpoint(write_raw()) as endpoint:
        endpoint.behavior = write_raw(
            b"HTTP/1.1 " + status + b"\r\nContent-Length: 1000000\r\n\r\nx", keep_open_until=endpoint.released
        )
        answer = send(endpoint.url)
    assert answer.status_code == int(status[:3])
    assert answer.error == error


@pytest.mark.parametrize("status", [b"200 OK", b"500 No"])
def test_endless_body_is_not_read(status: bytes) -> None:
    """The sender closes the connection after the first kilobyte of a body."""
    disconnected = threading.Event()
    written_bytes: list[int] = []

    def write_endless_body(request: BaseHTTPRequestHandler, _number: int) -> None:
        request.wfile.write(b"HTTP/1.1 " + status + b"\r\nConnection: close\r\n\r\n")
        try:
            while True:
                request.wfile.write(b"x" * 65536)
                written_bytes.append(65536)
        except OSError:
            disconnected.set()

    with FakeEndpoint(write_endless_body) as endpoint:
        answer = send(endpoint.url)
        assert disconnected.wait(60)
    assert answer.status_code == int(status[:3])
    assert sum(written_bytes) < 32 * 2**20, "the endpoint could write more than socket buffers hold"


def test_compressed_body_is_not_decompressed() -> None:
    """A decompression bomb in an answer has no effect."""
    bomb = gzip.compress(b"unpacked " * 5_000_000)
    with FakeEndpoint(Reply(500, {"Content-Encoding": "gzip"}, bomb)) as endpoint:
        answer = send(endpoint.url)
    assert answer.status_code == 500
    assert "unpacked" not in str(answer.error)
    assert endpoint.received[0].headers["accept-encoding"] == "identity"


@pytest.mark.parametrize(
    "garbage",
    [b"", b"hello\r\n\r\n", b"HTTP/1.1 abc\r\n\r\n", b"HTTP/1.1 200 OK\r\nX: \xff\0\r\n\r\n", b"\x16\x03\x01"],
)
def test_invalid_http_is_an_error(garbage: bytes) -> None:
    """An answer that is not HTTP becomes a printable error."""
    with FakeEndpoint(write_raw(garbage)) as endpoint:
        answer = send(endpoint.url)
    assert answer.status_code is None
    assert answer.error
    assert answer.error.isprintable()


def test_refused_connection_is_an_error() -> None:
    """A refused connection is an error that says so."""
    with reserve_closed_port() as url:
        answer = send(url)
    assert answer.status_code is None
    assert answer.error is not None
    assert answer.error == f"cannot connect to {urlsplit(url).netloc}: Connection refused"


@pytest.mark.parametrize(
    "url", ["", "not a url", "ftp://127.0.0.1/", "http://", "http://[::1", "http://127.0.0.1:99999/"]
)
def test_invalid_url_is_an_error(url: str) -> None:
    """A URL that cannot be requested fails the attempt, not the sender."""
    answer = send(url)
    assert answer.status_code is None
    assert answer.error


def test_proxy_variables_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Proxies from the environment are not used for webhooks."""
    with FakeEndpoint(Reply(502)) as proxy, FakeEndpoint(Reply(200)) as endpoint:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy.url)
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        answer = send(endpoint.url)
    assert answer.status_code == 200
    assert proxy.received == []


def test_cookies_are_not_sent_back() -> None:
    """A cookie set by one answer is not sent with the next event."""
    with FakeEndpoint(Reply(200, {"Set-Cookie": "a=b"})) as endpoint:
        send(endpoint.url.replace("127.0.0.1", "localhost"), times=2)  # HTTP clients keep no cookies for IP addresses
    assert "cookie" not in endpoint.received[1].headers


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
