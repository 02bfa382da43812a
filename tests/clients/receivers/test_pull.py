"""A receiver that fetches its events from a pull endpoint: settlement, repeats, outages and malformed answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from evalstop_client.receivers.stop.journal import Journal
from evalstop_client.receivers.stop.receiver import Puller
from evalstop_client.receivers.stop.webhooks import Receiver

from tests.clients.fake_service import KEY, PROBLEM, Answer, FakeServer, FakeService
from tests.clients.programs import wait_until
from tests.clients.receivers.fake_pull_endpoint import FakePullEndpoint
from tests.clients.receivers.fake_scheduler import FakeScheduler
from tests.clients.receivers.listening_receiver import make_receiver
from tests.clients.webhooks import SECRET, make_stop_event


@pytest.fixture
def endpoint(service: FakeService, tmp_path: Path) -> FakePullEndpoint:
    endpoint = FakePullEndpoint(tmp_path / "journal")
    service.intercept = endpoint.answer
    return endpoint


@dataclass
class PullingReceiver:
    """A receiver that fetches its events once its puller is started."""

    scheduler: FakeScheduler
    receiver: Receiver
    puller: Puller


@pytest.fixture
def pulling(server: FakeServer, endpoint: FakePullEndpoint, tmp_path: Path) -> Iterator[PullingReceiver]:
    scheduler, journal = FakeScheduler(), Journal(tmp_path / "journal")
    receiver = make_receiver(scheduler, journal, server, [SECRET])
    puller = Puller(server.url, KEY, "e1", receiver, poll_seconds=1.0)
    yield PullingReceiver(scheduler, receiver, puller)
    puller.end()
    scheduler.may_answer.set()
    assert receiver.shut_down(20)
    journal.close()


def test_fetched_event_is_settled_once_journaled(
    pulling: PullingReceiver, endpoint: FakePullEndpoint, service: FakeService
) -> None:
    """A fetched stop is settled after it is in the journal, then carried out and reported."""
    pulling.scheduler.may_answer.clear()
    endpoint.add(make_stop_event({}))
    pulling.puller.start()
    wait_until(lambda: endpoint.settlements)
    assert endpoint.settlements == [{"delivery_id": "d1", "attempt": 1, "status": 202, "error": ""}]
    assert endpoint.journaled == [True]
    pulling.scheduler.may_answer.set()
    ((decision_id, report),) = wait_until(lambda: service.reports)
    assert (decision_id, report["state"]) == ("decision-1", "confirmed")


def test_lost_settlement_does_not_repeat_the_stop(pulling: PullingReceiver, endpoint: FakePullEndpoint) -> None:
    """An event that is delivered again because its settlement was lost is recognized, and cancels the job once."""
    endpoint.refuses_settlements = True
    endpoint.add(make_stop_event({}))
    pulling.puller.start()
    wait_until(lambda: endpoint.claims > 3)
    endpoint.refuses_settlements = False
    wait_until(lambda: endpoint.settlements)
    assert pulling.receiver.wait_idle(20)
    assert pulling.scheduler.calls == ["cancel"]


def test_polling_continues_through_errors(pulling: PullingReceiver, endpoint: FakePullEndpoint) -> None:
    """Polling continues after a 503, a 429 and a proxy's page."""
    endpoint.errors = [Answer(503, {}), Answer(200, "<html>"), Answer(429, {}, {"retry-after": "0"})]
    endpoint.add(make_stop_event({}))
    pulling.puller.start()
    wait_until(lambda: endpoint.settlements)
    assert endpoint.claims >= 4


def test_forged_event_is_settled_with_401(pulling: PullingReceiver, endpoint: FakePullEndpoint) -> None:
    """An event with a wrong signature is settled with 401 and starts no stop; the next event does."""
    endpoint.add(make_stop_event({}), secret="whsec_AAAA")
    endpoint.add(make_stop_event({}, "decision-2"), "d2")
    pulling.puller.start()
    wait_until(lambda: pulling.scheduler.requests)
    assert pulling.receiver.wait_idle(20)
    assert [request.decision_id for request in pulling.scheduler.requests] == ["decision-2"]
    assert endpoint.settlements[0]["status"] == 401


@pytest.mark.parametrize("malformed", [None, 3, {}, {"headers": {}, "body": 3, "delivery_id": "d", "attempt": 1}])
def test_malformed_answer_is_skipped(pulling: PullingReceiver, endpoint: FakePullEndpoint, malformed: Any) -> None:
    """A malformed answer does not keep the receiver from fetching the next event."""
    endpoint.errors = [Answer(200, {"events": [malformed]}), Answer(200, {"events": 3}), Answer(200, {})]
    endpoint.add(make_stop_event({}))
    pulling.puller.start()
    wait_until(lambda: endpoint.settlements)


def test_unknown_endpoint_is_polled_rarely(pulling: PullingReceiver, endpoint: FakePullEndpoint) -> None:
    """After a 404, which only a person can fix, the receiver waits much longer than its polling interval."""
    endpoint.errors = [Answer(404, {"title": "no such endpoint"}, {"content-type": PROBLEM})] * 100
    thread = threading.Thread(target=pulling.puller.run)
    thread.start()
    wait_until(lambda: endpoint.claims == 1)
    time.sleep(0.3)
    assert endpoint.claims == 1
    pulling.puller.end()
    thread.join(60)
    assert not thread.is_alive()
