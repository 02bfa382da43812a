"""The receiver over real sockets: who is let in, what is done once, what is reported, and whom it does not wait for."""

from __future__ import annotations

import base64
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from evalstop_client.errors import ConfigurationError
from evalstop_client.receivers import Ended, Failed, NotMine, Receiver, StopRequest
from evalstop_client.receivers.app import BODY_LIMIT_BYTES, ReceiverServer
from evalstop_client.receivers.cli import secrets_from
from evalstop_client.receivers.report import Reports

from tests.clients.fake_service import KEY, PROBLEM, Answer, FakeServer, FakeService
from tests.clients.programs import eventually
from tests.clients.webhooks import SECRET, send, stop_event

OTHER = "whsec_" + base64.b64encode(b"another secret").decode()


GONE = Ended("it is gone", {"exit_status": -15})
LENGTHS = [b"", b"Content-Length: x\r\n", b"Content-Length: -1\r\n", b"Content-Length: \xb2\r\n"]


@dataclass
class FakeAction:
    """Ends nothing, and remembers what it was asked to end."""

    result: Ended | NotMine | Failed | Exception = field(
        default_factory=lambda: Ended("it is gone", {"exit_status": -15})
    )
    asked: list[StopRequest] = field(default_factory=list)
    go_on: threading.Event = field(default_factory=threading.Event)
    name: str = "fake action"

    def stop(self, request: StopRequest) -> Ended | NotMine | Failed:
        self.asked.append(request)
        self.go_on.wait(20)
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


@dataclass
class Setup:
    """A receiver that listens, and what stands around it."""

    action: FakeAction
    receiver: Receiver
    url: str
    secrets: list[str]


@pytest.fixture
def setup(server: FakeServer) -> Iterator[Setup]:
    action, secrets = FakeAction(), [SECRET]
    action.go_on.set()
    reports = Reports(server.url, KEY, action.name, report_seconds=20)
    receiver = Receiver(action, lambda: secrets, reports)
    listening = ReceiverServer("127.0.0.1", 0, read_seconds=0.5)
    listening.serve(receiver)
    yield Setup(action, receiver, listening.url, secrets)
    action.go_on.set()
    assert receiver.wait_idle(20)
    listening.shutdown()
    listening.server_close()


def test_stop_is_answered_at_once_carried_out_and_reported(setup: Setup, service: FakeService) -> None:
    """The sender does not wait for the job's end; the service hears of it when it has come."""
    setup.action.go_on.clear()
    assert send(setup.url, stop_event({"a": "b"})).status_code == 202
    assert service.reports == []
    setup.action.go_on.set()
    ((decision_id, report),) = eventually(lambda: service.reports)
    assert decision_id == "decision-1"
    assert report == {
        "state": "confirmed", "actor": "fake action", "reason": "it is gone", "details": {"exit_status": -15}
    }  # fmt: skip
    (request,) = setup.action.asked
    assert (request.run_name, request.labels, request.reason) == ("a run", {"a": "b"}, "3 declines in a row")


def test_report_is_repeated_until_it_is_accepted(setup: Setup, service: FakeService) -> None:
    """A service that is away when the job ends still hears of it."""
    service.forced = [Answer(503, {}), Answer(500, {})]
    send(setup.url, stop_event({}))
    assert eventually(lambda: service.reports)


def test_refused_report_is_not_repeated(setup: Setup, service: FakeService) -> None:
    """A decision that the service does not know is not insisted upon."""
    service.forced = [Answer(404, {"title": "no such decision"}, {"content-type": PROBLEM})]
    send(setup.url, stop_event({}))
    eventually(lambda: setup.action.asked)
    assert setup.receiver.wait_idle(20)
    assert len(service.requests) == 1


@pytest.mark.parametrize("result", [Failed("it hangs"), RuntimeError("it hangs")])
def test_failure_is_reported_as_failure(setup: Setup, service: FakeService, result: Failed | Exception) -> None:
    """An action that fails, or breaks, is reported with its words."""
    setup.action.result = result
    send(setup.url, stop_event({}))
    ((_, report),) = eventually(lambda: service.reports)
    assert report["state"] == "failed"
    assert "it hangs" in report["reason"]


def test_job_of_another_receiver_is_none_of_ours(setup: Setup, service: FakeService) -> None:
    """What is not ours is neither reported nor mistaken for an end of ours."""
    setup.action.result = NotMine()
    assert send(setup.url, stop_event({})).status_code == 202
    eventually(lambda: setup.action.asked)
    assert setup.receiver.wait_idle(20)
    assert not setup.receiver.wait_obeyed(0)
    assert service.requests == []


def test_repeated_id_does_nothing(setup: Setup) -> None:
    """The same webhook-id again, during and after the stop, is answered 200 and not acted upon."""
    setup.action.go_on.clear()
    assert send(setup.url, stop_event({})).status_code == 202
    assert send(setup.url, stop_event({})).status_code == 200
    setup.action.go_on.set()
    assert setup.receiver.wait_idle(20)
    assert send(setup.url, stop_event({})).json() == {"repeat": "msg_1"}
    assert send(setup.url, stop_event({}), webhook_id="msg_2").status_code == 202
    assert setup.receiver.wait_idle(20)
    assert len(setup.action.asked) == 2


@pytest.mark.parametrize(("secret", "age_seconds"), [(OTHER, 0), (SECRET, 3_600), (SECRET, -3_600)])
def test_bad_or_old_signature_is_turned_away(setup: Setup, secret: str, age_seconds: float) -> None:
    """A foreign secret, a replay of an hour ago and a message from the future all get 401, and the reason."""
    answer = send(setup.url, stop_event({}), secret=secret, age_seconds=age_seconds)
    assert answer.status_code == 401
    assert answer.json()["error"]
    assert setup.action.asked == []


def test_turned_away_id_is_not_remembered(setup: Setup) -> None:
    """A stranger cannot have a webhook ignored by using up its id."""
    assert send(setup.url, stop_event({}), secret=OTHER).status_code == 401
    assert send(setup.url, stop_event({})).status_code == 202


def test_unsigned_request_is_turned_away(setup: Setup) -> None:
    """Without signature headers nothing is read."""
    assert httpx.post(setup.url, json=stop_event({})).status_code == 401


def test_both_secrets_are_good_while_one_is_replaced(setup: Setup) -> None:
    """A secret added while the receiver runs is good from then on, beside the old one."""
    assert send(setup.url, stop_event({}), webhook_id="1", secret=OTHER).status_code == 401
    setup.secrets.append(OTHER)
    assert send(setup.url, stop_event({}), webhook_id="2", secret=OTHER).status_code == 202
    assert send(setup.url, stop_event({}), webhook_id="3", secret=SECRET).status_code == 202


def test_without_a_secret_the_sender_is_asked_to_come_again(setup: Setup) -> None:
    """A secret file that is not there yet must not make the service give up."""
    setup.secrets.clear()
    assert send(setup.url, stop_event({})).status_code == 503


def test_other_events_are_ignored_politely(setup: Setup) -> None:
    """An event of another type is answered 200 and named."""
    answer = send(setup.url, {"type": "run.suspected", "data": {}})
    assert (answer.status_code, answer.json()) == (200, {"ignored": "run.suspected"})


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
def test_signed_rubbish_is_refused(setup: Setup, body: bytes) -> None:
    """A body that is no event gets 422, however well it is signed."""
    assert send(setup.url, body).status_code == 422
    assert setup.action.asked == []


def test_body_too_large_is_refused_unread(setup: Setup) -> None:
    """Beyond 1 MiB the answer is 413; exactly 1 MiB is read."""
    assert send(setup.url, b" " * (BODY_LIMIT_BYTES + 1)).status_code == 413
    assert send(setup.url, b" " * BODY_LIMIT_BYTES).status_code == 422


def raw_exchange(url: str, request: bytes) -> bytes:
    """What comes back to bytes that no HTTP library would send, until the receiver hangs up."""
    parsed = httpx.URL(url)
    with socket.create_connection((parsed.host, parsed.port or 80), timeout=20) as connection:
        connection.sendall(request)
        answer = b""
        while data := connection.recv(65536):
            answer += data
        return answer


@pytest.mark.parametrize(
    "length", [b"", b"Content-Length: x\r\n", b"Content-Length: -1\r\n", b"Content-Length: \xb2\r\n"]
)
def test_body_of_unknown_length_is_refused(setup: Setup, length: bytes) -> None:
    """Without a length in digits the body is not read."""
    assert b" 411 " in raw_exchange(setup.url, b"POST / HTTP/1.0\r\n" + length + b"\r\n").splitlines()[0]


@pytest.mark.parametrize(
    "beginning", [b"", b"POST / HT", b"POST / HTTP/1.1\r\nX: y", b"POST / HTTP/1.1\r\nContent-Length: 99\r\n\r\nabc"]
)
def test_slow_sender_is_hung_up_on(setup: Setup, beginning: bytes) -> None:
    """Whoever stops in the middle is hung up on, and others are served meanwhile."""
    parsed = httpx.URL(setup.url)
    with socket.create_connection((parsed.host, parsed.port or 80), timeout=20) as connection:
        connection.sendall(beginning)
        assert httpx.get(setup.url + "livez").json() == {"status": "ok"}
        while connection.recv(65536):
            pass
    assert setup.action.asked == []


def test_dripping_sender_is_hung_up_on(setup: Setup) -> None:
    """A byte now and then does not keep a connection open beyond the deadline."""
    parsed = httpx.URL(setup.url)
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

        eventually(hung_up)


def test_livez_and_nothing_else_can_be_read(setup: Setup) -> None:
    """Anyone may ask whether it lives; any other page is not there, any other verb not known."""
    assert httpx.get(setup.url + "livez").status_code == 200
    assert httpx.get(setup.url).status_code == 404
    assert httpx.put(setup.url).status_code == 501


def test_secret_file_is_read_again_each_time(tmp_path: Path) -> None:
    """A secret can be put in place and replaced while the job runs; a bad one is as good as none."""
    file = tmp_path / "secret"
    secrets = secrets_from("UNUSED", file)
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
        secrets_from("THE_SECRET", None)
    monkeypatch.setenv("THE_SECRET", "whsec_?!")
    with pytest.raises(ConfigurationError):
        secrets_from("THE_SECRET", None)
    monkeypatch.setenv("THE_SECRET", f"{SECRET} {OTHER}")
    assert secrets_from("THE_SECRET", None)() == [SECRET, OTHER]
