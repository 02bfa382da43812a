"""The sender meets endpoints as they are in the wild; whatever they do, an answer comes back, and in time."""

from __future__ import annotations

import asyncio
import gzip
import threading
from http.server import BaseHTTPRequestHandler

import pytest
from evalstop_service.webhooks.delivery.send import Sender
from evalstop_service.webhooks.retry import Answer

from tests.service.webhooks.delivery.fakes import LOOPBACK, Behavior, FakeEndpoint, Reply, closed_port


def send(url: str, times: int = 1, timeout_seconds: float = 20.0, body: bytes = b"{}") -> Answer:
    """Send the same thing `times` over one session; the last answer."""

    async def run() -> Answer:
        async with Sender(timeout_seconds, timeout_seconds, address_policy=LOOPBACK) as sender:
            for _ in range(times - 1):
                await sender.send(url, {"webhook-id": "msg_1"}, body)
            return await sender.send(url, {"webhook-id": "msg_1"}, body)

    return asyncio.run(run())


def write(*parts: bytes, then: threading.Event | None = None) -> Behavior:
    """Writes raw bytes instead of a proper answer, and keeps the connection open until the event."""

    def behavior(request: BaseHTTPRequestHandler, _number: int) -> None:
        for part in parts:
            request.wfile.write(part)
        if then is not None:
            then.wait(30)

    return behavior


def test_posts_what_it_is_given() -> None:
    """The body arrives byte for byte as JSON, with the headers given."""
    with FakeEndpoint(Reply(204)) as endpoint:
        answer = send(endpoint.url, body='{"name":"né"}'.encode())
    (received,) = endpoint.received
    assert (answer.status_code, answer.error) == (204, None)
    assert received.body == '{"name":"né"}'.encode()
    assert received.headers["content-type"] == "application/json"
    assert received.headers["webhook-id"] == "msg_1"
    assert answer.duration_ms > 0


def test_keeps_the_connection() -> None:
    """Several events to one endpoint share a connection."""
    ports: set[int] = set()

    def behavior(request: BaseHTTPRequestHandler, _number: int) -> Reply:
        ports.add(request.client_address[1])
        return Reply(200, body=b"thanks")

    with FakeEndpoint(behavior) as endpoint:
        send(endpoint.url, times=3)
    assert len(endpoint.received) == 3
    assert len(ports) == 1


def test_shows_the_error() -> None:
    """An error carries the start of its body in one printable line, and what the endpoint asked for."""
    reply = Reply(503, {"Retry-After": "7"}, b"down\0for\r\n maintenance \xff" + b"x" * 5000)
    with FakeEndpoint(reply) as endpoint:
        answer = send(endpoint.url)
    assert answer.status_code == 503
    assert answer.retry_after == "7"
    assert answer.error is not None
    assert answer.error.startswith("HTTP 503: down for maintenance")
    assert answer.error.isprintable()
    assert len(answer.error) < 400


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_follows_no_redirect(status: int) -> None:
    """A redirect is an answer: what it points to is never asked."""
    with FakeEndpoint(Reply()) as target, FakeEndpoint(Reply(status, {"Location": target.url})) as endpoint:
        answer = send(endpoint.url)
    assert answer.status_code == status
    assert target.received == []


def test_gives_up_on_silence() -> None:
    """An endpoint that takes the event and says nothing is left after the timeout."""
    with FakeEndpoint(write()) as endpoint:
        endpoint.behavior = write(then=endpoint.released)
        answer = send(endpoint.url, timeout_seconds=0.3)
    assert answer.status_code is None
    assert answer.error == "no answer within 0.3 s"


def test_gives_up_on_dripping_headers() -> None:
    """Headers that drip in for ever, each in time, do not prolong the attempt."""
    stop = threading.Event()

    def drip(request: BaseHTTPRequestHandler, _number: int) -> None:
        request.wfile.write(b"HTTP/1.1 200 OK\r\n")
        while not stop.wait(0.02):
            request.wfile.write(b"X-Drip: 1\r\n")

    with FakeEndpoint(drip) as endpoint:
        answer = send(endpoint.url, timeout_seconds=0.4)
        stop.set()
    assert answer.status_code is None
    assert answer.error is not None


@pytest.mark.parametrize(("status", "error"), [(b"200 OK", None), (b"500 No", "HTTP 500: x")])
def test_a_status_is_enough(status: bytes, error: str | None) -> None:
    """The status counts as soon as it is there; a body that never ends is not waited for."""
    with FakeEndpoint(write()) as endpoint:
        endpoint.behavior = write(
            b"HTTP/1.1 " + status + b"\r\nContent-Length: 1000000\r\n\r\nx", then=endpoint.released
        )
        answer = send(endpoint.url)
    assert answer.status_code == int(status[:3])
    assert answer.error == error


@pytest.mark.parametrize("status", [b"200 OK", b"500 No"])
def test_reads_no_huge_body(status: bytes) -> None:
    """A body without end is left after its first kilobyte."""
    hung_up = threading.Event()
    poured: list[int] = []

    def pour(request: BaseHTTPRequestHandler, _number: int) -> None:
        request.wfile.write(b"HTTP/1.1 " + status + b"\r\nConnection: close\r\n\r\n")
        try:
            while True:
                request.wfile.write(b"x" * 65536)
                poured.append(65536)
        except OSError:
            hung_up.set()

    with FakeEndpoint(pour) as endpoint:
        answer = send(endpoint.url)
        assert hung_up.wait(30)
    assert answer.status_code == int(status[:3])
    assert sum(poured) < 32 * 2**20, "more was taken than the buffers on the way can hold"


def test_unpacks_no_bomb() -> None:
    """A compressed body is never unpacked."""
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
def test_survives_garbage(garbage: bytes) -> None:
    """What is not HTTP is an error that can be shown and stored."""
    with FakeEndpoint(write(garbage)) as endpoint:
        answer = send(endpoint.url)
    assert answer.status_code is None
    assert answer.error
    assert answer.error.isprintable()


def test_nobody_listens() -> None:
    """A refused connection is an error that says so."""
    with closed_port() as url:
        answer = send(url)
    assert answer.status_code is None
    assert answer.error is not None
    assert "connect" in answer.error.lower()


@pytest.mark.parametrize(
    "url", ["", "not a url", "ftp://127.0.0.1/", "http://", "http://[::1", "http://127.0.0.1:99999/"]
)
def test_survives_bad_urls(url: str) -> None:
    """A URL that cannot be called is an error of the attempt, not of the sender."""
    answer = send(url)
    assert answer.status_code is None
    assert answer.error


def test_uses_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Proxies of the environment are not used: events go where they are addressed."""
    with FakeEndpoint(Reply(502)) as proxy, FakeEndpoint(Reply(200)) as endpoint:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy.url)
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        answer = send(endpoint.url)
    assert answer.status_code == 200
    assert proxy.received == []


def test_keeps_no_cookies() -> None:
    """What one answer sets is not sent along with the next event."""
    with FakeEndpoint(Reply(200, {"Set-Cookie": "a=b"})) as endpoint:
        send(endpoint.url.replace("127.0.0.1", "localhost"), times=2)  # by name: no client keeps cookies of addresses
    assert "cookie" not in endpoint.received[1].headers
