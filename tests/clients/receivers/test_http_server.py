"""The receiver's HTTP server over real sockets: signatures, certificates, limits and slow clients."""

from __future__ import annotations

import base64
import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from evalstop_client.errors import ConfigurationError
from evalstop_client.receivers.kubernetes.api import Access, Api
from evalstop_client.receivers.stop.receiver import load_secrets
from evalstop_client.receivers.stop.webhooks import BODY_LIMIT_BYTES
from evalstop_client.service import trusted_certificates
from evalstop_lab.replay.servers import Remote

from tests.clients.programs import wait_until
from tests.clients.receivers.listening_receiver import ListeningReceiver
from tests.clients.webhooks import SECRET, make_stop_event, post_event

OTHER_SECRET = "whsec_" + base64.b64encode(b"another secret").decode()


BAD_CONTENT_LENGTHS = [b"", b"Content-Length: x\r\n", b"Content-Length: -1\r\n", b"Content-Length: \xb2\r\n"]


@pytest.mark.parametrize(("secret", "age_seconds"), [(OTHER_SECRET, 0), (SECRET, 3_600), (SECRET, -3_600)])
def test_bad_or_expired_signature_gets_401(listener: ListeningReceiver, secret: str, age_seconds: float) -> None:
    """A wrong secret, and a timestamp an hour in the past or the future, get 401 with the reason."""
    answer = post_event(listener.url, make_stop_event({}), secret=secret, age_seconds=age_seconds)
    assert answer.status_code == 401
    assert answer.json()["error"]
    assert listener.scheduler.requests == []


def test_unsigned_request_gets_401(listener: ListeningReceiver) -> None:
    """A request without signature headers gets 401."""
    assert httpx.post(listener.url, json=make_stop_event({}), timeout=60).status_code == 401


def test_both_secrets_are_valid_during_rotation(listener: ListeningReceiver) -> None:
    """A secret added while the receiver runs is valid from then on, as is the old one."""
    assert post_event(listener.url, make_stop_event({}, "1"), secret=OTHER_SECRET).status_code == 401
    listener.secrets.append(OTHER_SECRET)
    assert post_event(listener.url, make_stop_event({}, "2"), secret=OTHER_SECRET).status_code == 202
    assert post_event(listener.url, make_stop_event({}, "3"), secret=SECRET).status_code == 202


def test_missing_secret_gets_503(listener: ListeningReceiver) -> None:
    """While the secret file does not exist the receiver answers 503, so that the service retries."""
    listener.secrets.clear()
    assert post_event(listener.url, make_stop_event({})).status_code == 503


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"no json",
        b"\xff\xfe",
        b"[]",
        b"{}",
        b'{"type": 3}',
        b"[" * 200_000,
        b'{"type": "run.stop_requested"}',
        b'{"type": "run.stop_requested", "data": {"run": [], "decision": {}, "verdict": {}}}',
        b'{"type": "run.stop_requested", "data": {"run": {"id": 1}, "decision": {"id": "x"}, "verdict": {}}}',
        b'{"type": "run.stop_requested", "data": {"run": {"id": "1"}, "decision": {"id": "../x"}, "verdict": {}}}',
    ],
)
def test_signed_malformed_body_gets_422(listener: ListeningReceiver, body: bytes) -> None:
    """A signed body that is not an event gets 422 and starts no stop."""
    assert post_event(listener.url, body).status_code == 422
    assert listener.scheduler.requests == []


def test_oversized_body_gets_413(listener: ListeningReceiver) -> None:
    """A body over 1 MiB gets 413; one of exactly 1 MiB is read."""
    head = f"POST / HTTP/1.0\r\nContent-Length: {BODY_LIMIT_BYTES + 1}\r\n\r\n"
    assert b" 413 " in send_raw(listener.url, head.encode()).splitlines()[0]
    assert post_event(listener.url, b" " * BODY_LIMIT_BYTES).status_code == 422


def send_raw(url: str, request: bytes) -> bytes:
    """The answer to raw bytes, read until the receiver closes the connection."""
    parsed = httpx.URL(url)
    with socket.create_connection((parsed.host, parsed.port or 80), timeout=20) as connection:
        connection.sendall(request)
        answer = b""
        while data := connection.recv(65536):
            answer += data
        return answer


@pytest.mark.parametrize("length", BAD_CONTENT_LENGTHS)
def test_invalid_content_length_gets_411(listener: ListeningReceiver, length: bytes) -> None:
    """A request whose Content-Length is missing or not digits gets 411."""
    assert b" 411 " in send_raw(listener.url, b"POST / HTTP/1.0\r\n" + length + b"\r\n").splitlines()[0]


@pytest.mark.parametrize(
    "beginning", [b"", b"POST / HT", b"POST / HTTP/1.1\r\nX: y", b"POST / HTTP/1.1\r\nContent-Length: 99\r\n\r\nabc"]
)
def test_stalled_request_is_disconnected(listener: ListeningReceiver, beginning: bytes) -> None:
    """A connection that stops in the middle of a request is closed, and other requests are served meanwhile."""
    listener.http_server.read_seconds = 0.5
    parsed = httpx.URL(listener.url)
    with socket.create_connection((parsed.host, parsed.port or 80), timeout=20) as connection:
        connection.sendall(beginning)
        assert httpx.get(listener.url + "livez", timeout=60).json() == {"status": "ok"}
        while connection.recv(65536):
            pass
    assert listener.scheduler.requests == []


def test_trickling_request_is_disconnected(listener: ListeningReceiver) -> None:
    """A byte now and then does not keep a connection open beyond the deadline."""
    listener.http_server.read_seconds = 0.5
    parsed = httpx.URL(listener.url)
    with socket.create_connection((parsed.host, parsed.port or 80), timeout=0.05) as connection:
        connection.sendall(b"POST / HTTP/1.1\r\n")

        def is_closed() -> bool:
            try:
                connection.sendall(b"a")
                return connection.recv(1) == b""
            except TimeoutError:
                return False
            except OSError:
                return True

        wait_until(is_closed)


def test_secret_file_is_reread(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A secret file may come and change while the receiver runs; one that is absent, empty or malformed is logged."""
    file = tmp_path / "secret"
    secrets = load_secrets("UNUSED", file)
    assert "No such file" in caplog.text
    assert secrets() == []
    file.touch()
    assert secrets() == []
    assert "it must be whsec_" in caplog.text
    file.write_text(SECRET + "\n")
    assert secrets() == [SECRET]
    file.write_text(f"{OTHER_SECRET}\n{SECRET}\n")
    assert secrets() == [OTHER_SECRET, SECRET]
    file.write_text("whsec_?!")
    assert secrets() == []


def test_bad_secret_in_the_environment_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A secret that is missing or malformed in the environment is a ConfigurationError."""
    with pytest.raises(ConfigurationError, match="THE_SECRET"):
        load_secrets("THE_SECRET", None)
    monkeypatch.setenv("THE_SECRET", "whsec_?!")
    with pytest.raises(ConfigurationError):
        load_secrets("THE_SECRET", None)
    monkeypatch.setenv("THE_SECRET", f"{SECRET} {OTHER_SECRET}")
    assert load_secrets("THE_SECRET", None)() == [SECRET, OTHER_SECRET]


def test_public_key_replaces_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a public key no secret is loaded; a malformed key is a ConfigurationError."""
    monkeypatch.setenv("THE_SECRET", SECRET)
    key = "whpk_" + base64.b64encode(bytes(32)).decode()
    assert load_secrets("THE_SECRET", None, [key])() == [key]
    for malformed in ("whpk_", "whpk_?!", key[:-8]):
        with pytest.raises(ConfigurationError, match="whpk_"):
            load_secrets("THE_SECRET", None, [malformed])


CONNECT: dict[str, Callable[[str], object]] = {
    "kubernetes": lambda scheme: Api(Access(f"{scheme}://127.0.0.1:9")),
    "replay": lambda scheme: Remote(ExitStack(), f"{scheme}://127.0.0.1:9", {}),
}


@pytest.mark.parametrize("connect", CONNECT.values(), ids=CONNECT)
def test_stale_certificate_file_does_not_stop_plain_http(
    monkeypatch: pytest.MonkeyPatch, connect: Callable[[str], object]
) -> None:
    """SSL_CERT_FILE of an earlier machine is not read for an address without TLS."""
    monkeypatch.setenv("SSL_CERT_FILE", "/nonexistent/ca.pem")
    trusted_certificates.cache_clear()
    with pytest.raises(OSError, match="No such file"):
        httpx.Client()
    connect("http")
