"""The receiver over real sockets: who is let in, what is done once, what is reported, and whom it does not wait for."""

from __future__ import annotations

import base64
import socket
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import pytest
from evalstop_client.errors import ConfigurationError
from evalstop_client.receivers import Receiver
from evalstop_client.receivers.memory import Memory
from evalstop_client.receivers.metrics import Metrics
from evalstop_client.receivers.options import secrets_from
from evalstop_client.receivers.pursuit import Surroundings
from evalstop_client.receivers.report import Reports
from evalstop_client.receivers.server import BODY_LIMIT_BYTES, ReceiverServer
from evalstop_client.receivers.stopping import Bounds

from tests.clients.fake_scheduler import AWAY, FakeScheduler
from tests.clients.fake_service import KEY, PROBLEM, Answer, FakeServer, FakeService
from tests.clients.programs import eventually
from tests.clients.webhooks import SECRET, send, stop_event

OTHER = "whsec_" + base64.b64encode(b"another secret").decode()


LENGTHS = [b"", b"Content-Length: x\r\n", b"Content-Length: -1\r\n", b"Content-Length: \xb2\r\n"]

QUICK = Bounds(
    checkpoint_seconds=0,
    cancel_seconds=0.2,
    give_up_seconds=0.4,
    abandon_seconds=20,
    tell_seconds=20,
    look_seconds=0.05,
)


@dataclass
class Setup:
    """A receiver that listens, and what stands around it."""

    action: FakeScheduler
    receiver: Receiver
    url: str
    secrets: list[str]
    memory: Memory


@pytest.fixture
def setup(server: FakeServer, tmp_path: Path) -> Iterator[Setup]:
    action, secrets, memory = FakeScheduler(), [SECRET], Memory(tmp_path / "memory")
    receiver = Receiver(
        Surroundings(action, memory, lambda: Reports(server.url, KEY, action.name), QUICK, Metrics()), lambda: secrets
    )
    listening = ReceiverServer("127.0.0.1", 0, read_seconds=0.5)
    listening.serve(receiver)
    yield Setup(action, receiver, listening.url, secrets, memory)
    action.go_on.set()
    assert receiver.leave(20)
    listening.shutdown()
    listening.server_close()
    memory.close()


def test_stop_is_answered_at_once_carried_out_and_reported(setup: Setup, service: FakeService) -> None:
    """The sender does not wait for the job's end; the service hears of it when it has come."""
    setup.action.go_on.clear()
    assert send(setup.url, stop_event({"a": "b"})).status_code == 202
    assert service.reports == []
    setup.action.go_on.set()
    ((decision_id, report),) = eventually(lambda: service.reports)
    assert decision_id == "decision-1"
    assert (report["state"], report["actor"]) == ("confirmed", "fake action")
    assert report["reason"] == "the job ended after it was cancelled"
    assert report["details"].items() >= {"job": "7", "user": "ann", "state": "ENDED", "exit_status": -15}.items()
    assert setup.action.verbs == ["cancel"]
    (request,) = setup.action.asked
    assert (request.run_name, request.labels, request.reason) == ("a run", {"a": "b"}, "3 declines in a row")


def test_stop_that_is_taken_up_is_acknowledged(setup: Setup, service: FakeService) -> None:
    """Once its job is found the service hears that the end is under way, and how long the job has to save."""
    send(setup.url, stop_event({"a": "b"}))
    ((decision_id, report),) = eventually(lambda: service.acknowledged)
    assert (decision_id, report["actor"]) == ("decision-1", "fake action")
    assert report["details"].items() >= {"job": "7", "user": "ann"}.items()
    assert report["expected_seconds"] == setup.receiver.surroundings.bounds.checkpoint_seconds


def test_nothing_waits_for_the_acknowledgement(setup: Setup, service: FakeService) -> None:
    """A service that takes its time to hear that a stop was taken up does not keep the job from its end."""
    service.hear.clear()
    send(setup.url, stop_event({}))
    ((_, report),) = eventually(lambda: service.reports)
    assert report["state"] == "confirmed"
    assert service.acknowledged == []
    service.hear.set()
    assert eventually(lambda: service.acknowledged)


def test_job_that_is_gone_is_not_acknowledged(setup: Setup, service: FakeService) -> None:
    """Where there is nothing to begin, only the end is told."""
    setup.action.gone = True
    send(setup.url, stop_event({}))
    assert eventually(lambda: service.reports)
    assert service.acknowledged == []


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
    assert service.forced == []
    assert service.reports == []


def test_job_that_stays_is_reported_as_failed_and_watched_on(setup: Setup, service: FakeService) -> None:
    """What cannot be ended is told once its time is over; should it end after all, that is told too."""
    setup.action.ends_on = None
    send(setup.url, stop_event({}))
    ((_, failed),) = eventually(lambda: service.reports)
    assert failed["state"] == "failed"
    assert "RUNNING" in failed["reason"]
    assert setup.action.verbs[:2] == ["cancel", "force"]
    setup.action.gone = True
    eventually(lambda: len(service.reports) == 2)
    assert service.reports[1][1]["state"] == "confirmed"


@pytest.mark.parametrize("trouble", [AWAY, RuntimeError("it hangs")])
def test_scheduler_that_is_away_is_waited_for(setup: Setup, service: FakeService, trouble: Exception) -> None:
    """A scheduler that does not answer, or an action that breaks, is told of and tried again until it works."""
    setup.action.trouble = trouble
    send(setup.url, stop_event({}))
    ((_, failed),) = eventually(lambda: service.reports)
    assert (failed["state"], setup.action.verbs) == ("failed", [])
    setup.action.trouble = None
    eventually(lambda: len(service.reports) == 2)
    assert (service.reports[1][1]["state"], setup.action.verbs) == ("confirmed", ["cancel"])


def test_refused_request_fails_and_may_be_made_again(setup: Setup, service: FakeService) -> None:
    """What is outside the allow-list is told at once; the same event later, with another allow-list, is obeyed."""
    setup.action.refusal = "not on the allow-list"
    send(setup.url, stop_event({}))
    ((_, report),) = eventually(lambda: service.reports)
    assert (report["state"], report["reason"], setup.action.verbs) == ("failed", "not on the allow-list", [])
    assert setup.receiver.wait_idle(20)
    setup.action.refusal = None
    assert send(setup.url, stop_event({})).status_code == 202
    eventually(lambda: len(service.reports) == 2)
    assert setup.action.verbs == ["cancel"]


def test_job_of_another_receiver_is_none_of_ours(setup: Setup, service: FakeService) -> None:
    """What is not ours is neither reported nor mistaken for an end of ours."""
    setup.action.is_mine = False
    assert send(setup.url, stop_event({})).status_code == 202
    eventually(lambda: setup.action.asked)
    assert setup.receiver.wait_idle(20)
    assert not setup.receiver.wait_obeyed(0)
    assert service.requests == []


def test_decision_is_obeyed_once(setup: Setup) -> None:
    """The same decision again, under the same webhook-id or another, during the stop and after it, changes nothing."""
    setup.action.go_on.clear()
    assert send(setup.url, stop_event({})).status_code == 202
    assert send(setup.url, stop_event({})).status_code == 200
    setup.action.go_on.set()
    assert setup.receiver.wait_idle(20)
    assert send(setup.url, stop_event({})).json() == {"repeat": "decision-1"}
    assert send(setup.url, stop_event({}), webhook_id="msg_2").status_code == 200
    assert setup.receiver.wait_idle(20)
    assert setup.action.verbs == ["cancel"]


def test_decision_is_obeyed_once_across_a_restart(setup: Setup, server: FakeServer, service: FakeService) -> None:
    """A receiver that was started again goes on where the one before it was, and repeats nothing."""
    setup.action.ends_on = None
    send(setup.url, stop_event({}))
    eventually(lambda: setup.action.verbs)
    assert setup.receiver.leave(20)
    assert send(setup.url, stop_event({}, "decision-2")).status_code == 503
    setup.memory.close()
    folder = setup.memory.folder
    assert folder is not None
    memory = Memory(folder)
    around = Surroundings(setup.action, memory, lambda: Reports(server.url, KEY, "next"), QUICK, Metrics())
    following = Receiver(around, lambda: [SECRET])
    setup.action.gone = True
    following.start()
    ((_, report),) = eventually(lambda: service.reports)
    assert (report["state"], report["actor"]) == ("confirmed", "next")
    assert following.wait_idle(20)
    assert setup.action.verbs == ["cancel"]
    assert len(setup.action.asked) == 1
    memory.close()


def test_escalation_of_a_stop_under_way_forces_it(setup: Setup, service: FakeService) -> None:
    """When the service loses its patience, the job is not given the rest of its time."""
    setup.action.ends_on = "force"
    patient = replace(QUICK, cancel_seconds=1_000, give_up_seconds=2_000)
    setup.receiver.surroundings = replace(setup.receiver.surroundings, bounds=patient)
    send(setup.url, stop_event({}))
    eventually(lambda: setup.action.verbs)
    event = {**stop_event({}), "type": "run.stop_escalated"}
    assert send(setup.url, event, webhook_id="msg_2").json() == {"escalated": "decision-1"}
    ((_, report),) = eventually(lambda: service.reports)
    assert report["reason"] == "the job ended after it was forced to"


def test_undo_goes_to_the_job_that_was_stopped(setup: Setup) -> None:
    """A stop that is done is undone once; one that nobody knows, or that is under way, is not."""
    event = {**stop_event({}), "type": "run.resume_requested"}
    assert send(setup.url, event).json() == {"unknown": "decision-1"}
    setup.action.go_on.clear()
    send(setup.url, stop_event({}))
    assert send(setup.url, event).status_code == 200  # not found yet, so there is nothing to undo
    setup.action.go_on.set()
    assert setup.receiver.wait_idle(20)
    assert send(setup.url, event).json() == {"undone": "decision-1"}
    assert send(setup.url, event).json() == {"repeat": "decision-1"}
    assert setup.action.verbs == ["cancel", "undo"]


def test_what_cannot_be_remembered_is_not_begun(setup: Setup) -> None:
    """A receiver that cannot write would obey twice after a restart: it asks the sender to come again."""
    folder = setup.memory.folder
    assert folder is not None
    folder.rename(folder.with_name("elsewhere"))
    assert send(setup.url, stop_event({})).status_code == 503
    folder.with_name("elsewhere").rename(folder)
    assert send(setup.url, stop_event({})).status_code == 202


def test_metrics_count_what_happened(setup: Setup) -> None:
    """What was answered, what came of it and what is under way can be read by a monitoring system."""
    send(setup.url, stop_event({}))
    eventually(lambda: setup.action.gone)
    assert setup.receiver.wait_idle(20)
    text = httpx.get(setup.url + "metrics").text
    assert 'evalstop_receiver_webhooks_total{status="202"} 1' in text
    assert 'evalstop_receiver_stops_total{result="confirmed"} 1' in text
    assert "evalstop_receiver_stops_under_way 0" in text
    assert "# TYPE evalstop_receiver_reports_total counter" in text


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
    assert send(setup.url, stop_event({}, "1"), secret=OTHER).status_code == 401
    setup.secrets.append(OTHER)
    assert send(setup.url, stop_event({}, "2"), secret=OTHER).status_code == 202
    assert send(setup.url, stop_event({}, "3"), secret=SECRET).status_code == 202


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


@pytest.mark.parametrize("length", LENGTHS)
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
