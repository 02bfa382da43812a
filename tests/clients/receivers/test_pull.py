"""A receiver that fetches its events: each is settled once it is remembered, and none is lost on the way."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from evalstop_client.receivers import Receiver
from evalstop_client.receivers.stop.execution import ReceiverContext
from evalstop_client.receivers.stop.journal import Journal
from evalstop_client.receivers.stop.metrics import Metrics
from evalstop_client.receivers.stop.pull import Puller
from evalstop_client.receivers.stop.report import ReportClient
from evalstop_client.signature import sign

from tests.clients.fake_service import KEY, PROBLEM, Answer, FakeServer, FakeService
from tests.clients.programs import eventually
from tests.clients.receivers.fake_scheduler import FakeScheduler
from tests.clients.receivers.listening_receiver import QUICK
from tests.clients.webhooks import SECRET, stop_event


@dataclass
class FakeMailbox:
    """What waits at a pull endpoint; it is given out until it is settled."""

    waiting: list[dict[str, Any]] = field(default_factory=list)
    settled: list[dict[str, Any]] = field(default_factory=list)
    claims: int = 0
    trouble: list[Answer] = field(default_factory=list)
    deaf_to_settlements: bool = False
    remembered_first: list[bool] = field(default_factory=list)
    folder: Path | None = None

    def put(self, event: Any, delivery_id: str = "d1", secret: str = SECRET) -> None:
        body = json.dumps(event)
        headers = sign(secret, f"msg-{delivery_id}", int(time.time()), body.encode())
        self.waiting.append({"delivery_id": delivery_id, "attempt": 1, "headers": headers, "body": body})

    def answer(self, path: str, body: Any) -> Answer | None:
        if path.endswith("/pull/endpoints/e1/claim"):
            self.claims += 1
            if self.trouble:
                return self.trouble.pop(0)
            if not self.waiting:
                time.sleep(0.02)
            return Answer(200, {"events": list(self.waiting)})
        if path.endswith("/pull/endpoints/e1/settle"):
            if self.deaf_to_settlements:
                return Answer(503, {})
            assert self.folder is not None
            self.remembered_first.append(any(self.folder.glob("*.json")))
            self.settled.append(body)
            self.waiting = [one for one in self.waiting if one["delivery_id"] != body["delivery_id"]]
            return Answer(200, {"settled": True})
        return None


@pytest.fixture
def mailbox(service: FakeService, tmp_path: Path) -> FakeMailbox:
    mailbox = FakeMailbox(folder=tmp_path / "memory")

    def forced(path: str, body: Any) -> Answer | None:
        answer = mailbox.answer(path, body)
        if answer is not None:
            service.forced.insert(0, forced)  # it is asked again and again
        return answer

    service.forced = [forced]
    return mailbox


@dataclass
class Setup:
    action: FakeScheduler
    receiver: Receiver
    puller: Puller


@pytest.fixture
def setup(server: FakeServer, mailbox: FakeMailbox, tmp_path: Path) -> Iterator[Setup]:
    action, memory = FakeScheduler(), Journal(tmp_path / "memory")
    around = ReceiverContext(action, memory, lambda: ReportClient(server.url, KEY, "fake"), QUICK, Metrics())
    receiver = Receiver(around, lambda: [SECRET])
    puller = Puller(server.url, KEY, "e1", receiver, poll_seconds=1.0)
    yield Setup(action, receiver, puller)
    puller.end()
    action.go_on.set()
    assert receiver.leave(20)
    memory.close()


def test_event_is_remembered_obeyed_settled_and_reported(
    setup: Setup, mailbox: FakeMailbox, service: FakeService
) -> None:
    """The whole way of a stop that was fetched; settled only once it is on the disk."""
    setup.action.go_on.clear()
    mailbox.put(stop_event({}))
    setup.puller.start()
    eventually(lambda: mailbox.settled)
    assert mailbox.settled == [{"delivery_id": "d1", "attempt": 1, "status": 202, "error": ""}]
    assert mailbox.remembered_first == [True]
    setup.action.go_on.set()
    ((decision_id, report),) = eventually(lambda: service.reports)
    assert (decision_id, report["state"]) == ("decision-1", "confirmed")


def test_settlement_that_is_lost_does_no_harm(setup: Setup, mailbox: FakeMailbox) -> None:
    """The event comes again, is known, and is obeyed once."""
    mailbox.deaf_to_settlements = True
    mailbox.put(stop_event({}))
    setup.puller.start()
    eventually(lambda: mailbox.claims > 3)
    mailbox.deaf_to_settlements = False
    eventually(lambda: mailbox.settled)
    assert setup.receiver.wait_idle(20)
    assert setup.action.verbs == ["cancel"]


def test_service_that_is_away_is_asked_on(setup: Setup, mailbox: FakeMailbox) -> None:
    """An outage, a key that is not good yet and an answer of a proxy end nothing."""
    mailbox.trouble = [Answer(503, {}), Answer(200, "<html>"), Answer(429, {}, {"retry-after": "0"})]
    mailbox.put(stop_event({}))
    setup.puller.start()
    eventually(lambda: mailbox.settled)
    assert mailbox.claims >= 4
    assert 'polls_total{answered="no"} 3' in setup.receiver.metrics.text()


def test_forged_event_is_not_believed(setup: Setup, mailbox: FakeMailbox) -> None:
    """Whoever answers in the place of the service, the signature decides."""
    mailbox.put(stop_event({}), secret="whsec_AAAA")
    mailbox.put(stop_event({}, "decision-2"), "d2")
    setup.puller.start()
    eventually(lambda: setup.action.asked)
    assert setup.receiver.wait_idle(20)
    assert [request.decision_id for request in setup.action.asked] == ["decision-2"]
    assert mailbox.settled[0]["status"] == 401


@pytest.mark.parametrize("rubbish", [None, 3, {}, {"headers": {}, "body": 3, "delivery_id": "d", "attempt": 1}])
def test_answer_that_cannot_be_read_is_passed_over(setup: Setup, mailbox: FakeMailbox, rubbish: Any) -> None:
    """What is no event does not keep the receiver from the next one."""
    mailbox.trouble = [Answer(200, {"events": [rubbish]}), Answer(200, {"events": 3}), Answer(200, {})]
    mailbox.put(stop_event({}))
    setup.puller.start()
    eventually(lambda: mailbox.settled)


def test_endpoint_that_is_not_there_is_asked_for_seldom(setup: Setup, mailbox: FakeMailbox) -> None:
    """A refusal that only a person can mend is not hammered on."""
    mailbox.trouble = [Answer(404, {"title": "no such endpoint"}, {"content-type": PROBLEM})] * 100
    thread = threading.Thread(target=setup.puller.run)
    thread.start()
    eventually(lambda: mailbox.claims == 1)
    time.sleep(0.3)
    assert mailbox.claims == 1
    setup.puller.end()
    thread.join(10)
    assert not thread.is_alive()
