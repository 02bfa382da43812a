"""Who is let in to a receiver over real sockets, and what is turned away: forged, old, too large, too slow, rubbish."""

from __future__ import annotations

import argparse
import base64
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from evalstop_client.errors import ConfigurationError
from evalstop_client.receivers.stop.http_server import BODY_LIMIT_BYTES
from evalstop_client.receivers.stop.options import listen, load_secrets
from evalstop_service.clock import utc_now

from tests.clients.programs import wait_until
from tests.clients.receivers.listening_receiver import ListeningReceiver
from tests.clients.webhooks import SECRET, make_stop_event, post_event
from tests.fixtures.certificates import create_self_signed_certificate

OTHER = "whsec_" + base64.b64encode(b"another secret").decode()


LENGTHS = [b"", b"Content-Length: x\r\n", b"Content-Length: -1\r\n", b"Content-Length: \xb2\r\n"]


@pytest.mark.parametrize(("secret", "age_seconds"), [(OTHER, 0), (SECRET, 3_600), (SECRET, -3_600)])
def test_bad_or_old_signature_is_turned_away(listener: ListeningReceiver, secret: str, age_seconds: float) -> None:
    """A foreign secret, a replay of an hour ago and a message from the future all get 401, and the reason."""
    answer = post_event(listener.url, make_stop_event({}), secret=secret, age_seconds=age_seconds)
    assert answer.status_code == 401
    assert answer.json()["error"]
    assert listener.scheduler.requests == []


def test_turned_away_id_is_not_remembered(listener: ListeningReceiver) -> None:
    """A stranger cannot have a webhook ignored by using up its id."""
    assert post_event(listener.url, make_stop_event({}), secret=OTHER).status_code == 401
    assert post_event(listener.url, make_stop_event({})).status_code == 202


def test_unsigned_request_is_turned_away(listener: ListeningReceiver) -> None:
    """Without signature headers nothing is read."""
    assert httpx.post(listener.url, json=make_stop_event({})).status_code == 401


def test_both_secrets_are_good_while_one_is_replaced(listener: ListeningReceiver) -> None:
    """A secret added while the receiver runs is good from then on, beside the old one."""
    assert post_event(listener.url, make_stop_event({}, "1"), secret=OTHER).status_code == 401
    listener.secrets.append(OTHER)
    assert post_event(listener.url, make_stop_event({}, "2"), secret=OTHER).status_code == 202
    assert post_event(listener.url, make_stop_event({}, "3"), secret=SECRET).status_code == 202


def test_without_a_secret_the_sender_is_asked_to_come_again(listener: ListeningReceiver) -> None:
    """A secret file that is not there yet must not make the service give up."""
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
    ],
)
def test_signed_rubbish_is_refused(listener: ListeningReceiver, body: bytes) -> None:
    """A body that is no event gets 422, however well it is signed."""
    assert post_event(listener.url, body).status_code == 422
    assert listener.scheduler.requests == []


def test_body_too_large_is_refused_unread(listener: ListeningReceiver) -> None:
    """Beyond 1 MiB the answer is 413; exactly 1 MiB is read."""
    assert post_event(listener.url, b" " * (BODY_LIMIT_BYTES + 1)).status_code == 413
    assert post_event(listener.url, b" " * BODY_LIMIT_BYTES).status_code == 422


def raw_exchange(url: str, request: bytes) -> bytes:
    """What comes back to bytes that no HTTP library would send, until the receiver hangs up."""
    parsed = httpx.URL(url)
    with socket.create_connection((parsed.host, parsed.port or 80), timeout=20) as connection:
        connection.sendall(request)
        answer = b""
        while data := connection.recv(65536):
            answer += data
        return answer


@pytest.mark.parametrize("length", LENGTHS)
def test_body_of_unknown_length_is_refused(listener: ListeningReceiver, length: bytes) -> None:
    """Without a length in digits the body is not read."""
    assert b" 411 " in raw_exchange(listener.url, b"POST / HTTP/1.0\r\n" + length + b"\r\n").splitlines()[0]


@pytest.mark.parametrize(
    "beginning", [b"", b"POST / HT", b"POST / HTTP/1.1\r\nX: y", b"POST / HTTP/1.1\r\nContent-Length: 99\r\n\r\nabc"]
)
def test_slow_sender_is_hung_up_on(listener: ListeningReceiver, beginning: bytes) -> None:
    """Whoever stops in the middle is hung up on, and others are served meanwhile."""
    parsed = httpx.URL(listener.url)
    with socket.create_connection((parsed.host, parsed.port or 80), timeout=20) as connection:
        connection.sendall(beginning)
        assert httpx.get(listener.url + "livez").json() == {"status": "ok"}
        while connection.recv(65536):
            pass
    assert listener.scheduler.requests == []


def test_dripping_sender_is_hung_up_on(listener: ListeningReceiver) -> None:
    """A byte now and then does not keep a connection open beyond the deadline."""
    parsed = httpx.URL(listener.url)
    with socket.create_connection((parsed.host, parsed.port or 80), timeout=0.05) as connection:
        connection.sendall(b"POST / HTTP/1.1\r\n")

        def hung_up() -> bool:
            try:
                connection.sendall(b"a")
                return connection.recv(1) == b""
            except TimeoutError:
                return False
            except OSError:
                return True

        wait_until(hung_up)


def test_secret_file_is_read_again_each_time(tmp_path: Path) -> None:
    """A secret can be put in place and replaced while the job runs; a bad one is as good as none."""
    file = tmp_path / "secret"
    secrets = load_secrets("UNUSED", file)
    assert secrets() == []
    file.write_text(SECRET + "\n")
    assert secrets() == [SECRET]
    file.write_text(f"{OTHER}\n{SECRET}\n")
    assert secrets() == [OTHER, SECRET]
    file.write_text("whsec_?!")
    assert secrets() == []


def test_missing_or_bad_secret_in_the_environment_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A receiver that could never verify anything does not start."""
    with pytest.raises(ConfigurationError, match="THE_SECRET"):
        load_secrets("THE_SECRET", None)
    monkeypatch.setenv("THE_SECRET", "whsec_?!")
    with pytest.raises(ConfigurationError):
        load_secrets("THE_SECRET", None)
    monkeypatch.setenv("THE_SECRET", f"{SECRET} {OTHER}")
    assert load_secrets("THE_SECRET", None)() == [SECRET, OTHER]


def test_a_public_key_takes_the_place_of_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who names one believes nothing that a secret signed; a broken one is told at once."""
    monkeypatch.setenv("THE_SECRET", SECRET)
    key = "whpk_" + base64.b64encode(bytes(32)).decode()
    assert load_secrets("THE_SECRET", None, [key])() == [key]
    for broken in ("whpk_", "whpk_?!", key[:-8]):
        with pytest.raises(ConfigurationError, match="whpk_"):
            load_secrets("THE_SECRET", None, [broken])


@pytest.fixture
def secured(
    listener: ListeningReceiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, ssl.SSLContext]]:
    """Where a receiver listens by TLS, with a key for its metrics; and who trusts its certificate."""
    certificate = create_self_signed_certificate(tmp_path, utc_now())
    monkeypatch.setenv("METRICS_KEY", "let-me-read")
    options = argparse.Namespace(tls_cert=certificate, tls_key=None, metrics_key_env="METRICS_KEY")
    listening = listen("127.0.0.1:0", options)
    listening.read_seconds = 0.5
    listening.serve(listener.receiver)
    yield listening.url, ssl.create_default_context(cafile=str(certificate))
    listening.shutdown()
    listening.server_close()


def test_webhooks_come_by_tls(listener: ListeningReceiver, secured: tuple[str, ssl.SSLContext]) -> None:
    """Who trusts the certificate posts by HTTPS; one who speaks plain HTTP, or nothing at all, holds nobody up."""
    url, trust = secured
    host, port = url.removeprefix("https://").rstrip("/").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as silent:
        with pytest.raises(httpx.HTTPError):
            httpx.post(url.replace("https:", "http:"), json={}, trust_env=False)
        with pytest.raises(httpx.ConnectError, match="certificate"):
            httpx.get(f"{url}livez", trust_env=False)
        assert post_event(url, make_stop_event({}), verify=trust).status_code == 202
        assert silent.recv(1) == b""  # hung up on, although it never shook hands


def test_metrics_may_ask_for_a_key(secured: tuple[str, ssl.SSLContext]) -> None:
    """Without the key that a variable names /metrics is closed, and /livez is not."""
    url, trust = secured
    with httpx.Client(base_url=url, verify=trust, trust_env=False) as client:
        assert client.get("/livez").status_code == 200
        for sent in ("", "Bearer", "Bearer let-me", "let-me-read"):
            assert client.get("/metrics", headers={"Authorization": sent}).status_code == 401
        answer = client.get("/metrics", headers={"Authorization": "Bearer let-me-read"})
        assert (answer.status_code, "evalstop_receiver_webhooks_total" in answer.text) == (200, True)


def test_a_certificate_that_cannot_be_used_is_told_at_once(tmp_path: Path) -> None:
    """So is a key without a certificate, and a variable of metrics that is not set."""
    (tmp_path / "no.pem").write_text("nothing")
    nothing = {"tls_cert": None, "tls_key": None, "metrics_key_env": None}
    for odd in (
        {"tls_cert": tmp_path / "no.pem"},
        {"tls_cert": tmp_path / "away.pem"},
        {"tls_key": tmp_path / "no.pem"},
        {"metrics_key_env": "NOWHERE_SET"},
    ):
        with pytest.raises(ConfigurationError, match=r"tls|metrics"):
            listen("127.0.0.1:0", argparse.Namespace(**(nothing | odd)))
