"""A receiver that listens, with a fake scheduler behind it and the fake service to report to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from evalstop_client.receivers import Receiver
from evalstop_client.receivers.stop.execution import ReceiverContext
from evalstop_client.receivers.stop.http_server import ReceiverServer
from evalstop_client.receivers.stop.journal import Journal
from evalstop_client.receivers.stop.metrics import Metrics
from evalstop_client.receivers.stop.report import ReportClient
from evalstop_client.receivers.stop.state_machine import StopTimeouts

from tests.clients.fake_service import KEY, FakeServer
from tests.clients.receivers.fake_scheduler import FakeScheduler
from tests.clients.webhooks import SECRET

QUICK = StopTimeouts(
    checkpoint_seconds=0,
    cancel_seconds=0.2,
    give_up_seconds=0.4,
    abandon_seconds=20,
    report_seconds=20,
    poll_seconds=0.05,
)


@dataclass
class Setup:
    """A receiver that listens, and what stands around it."""

    action: FakeScheduler
    receiver: Receiver
    url: str
    secrets: list[str]
    memory: Journal


@contextmanager
def receiving(server: FakeServer, folder: Path) -> Iterator[Setup]:
    """A receiver that reports to `server` and remembers in `folder`; it has come to rest with the block."""
    action, secrets, memory = FakeScheduler(), [SECRET], Journal(folder / "memory")
    receiver = Receiver(
        ReceiverContext(action, memory, lambda: ReportClient(server.url, KEY, action.name), QUICK, Metrics()),
        lambda: secrets,
    )
    listening = ReceiverServer("127.0.0.1", 0, read_seconds=0.5)
    listening.serve(receiver)
    yield Setup(action, receiver, listening.url, secrets, memory)
    action.go_on.set()
    assert receiver.leave(20)
    listening.shutdown()
    listening.server_close()
    memory.close()
