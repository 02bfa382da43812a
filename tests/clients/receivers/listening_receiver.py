"""A receiver that listens on a socket, with a fake scheduler behind it and the fake service to report to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from evalstop_client.receivers.stop.execution import ReceiverContext, ReportClient
from evalstop_client.receivers.stop.journal import Journal
from evalstop_client.receivers.stop.state_machine import StopTimeouts
from evalstop_client.receivers.stop.webhooks import Receiver, ReceiverServer

from tests.clients.fake_service import KEY, FakeServer
from tests.clients.receivers.fake_scheduler import FakeScheduler
from tests.clients.webhooks import SECRET

SHORT_TIMEOUTS = StopTimeouts(
    checkpoint_seconds=0,
    cancel_seconds=0.2,
    give_up_seconds=0.4,
    abandon_seconds=20,
    report_seconds=20,
    poll_seconds=0.05,
)


@dataclass
class ListeningReceiver:
    """A receiver, its HTTP server, scheduler, journal and webhook secrets, and the service that it reports to."""

    server: FakeServer
    scheduler: FakeScheduler
    receiver: Receiver
    http_server: ReceiverServer
    secrets: list[str]
    journal: Journal

    @property
    def url(self) -> str:
        return self.http_server.url

    def make_next_receiver(self) -> Receiver:
        """Shut this receiver down; returns one on the same journal."""
        assert self.receiver.shut_down(20)
        self.journal.close()
        assert self.journal.folder is not None
        self.journal = Journal(self.journal.folder)
        return make_receiver(self.scheduler, self.journal, self.server, self.secrets)


def make_receiver(scheduler: FakeScheduler, journal: Journal, server: FakeServer, secrets: list[str]) -> Receiver:
    """A receiver that reports to `server`."""
    reports = ReportClient(server.url, KEY)
    return Receiver(ReceiverContext(scheduler, journal, reports, SHORT_TIMEOUTS), lambda: secrets)


@contextmanager
def listening_receiver(server: FakeServer, folder: Path) -> Iterator[ListeningReceiver]:
    """A receiver that listens, reports to `server` and keeps its journal in `folder`; it is idle after the block."""
    scheduler, secrets, journal = FakeScheduler(), [SECRET], Journal(folder / "journal")
    receiver = make_receiver(scheduler, journal, server, secrets)
    http_server = ReceiverServer("127.0.0.1", 0)
    http_server.serve(receiver)
    listener = ListeningReceiver(server, scheduler, receiver, http_server, secrets, journal)
    yield listener
    scheduler.may_answer.set()
    assert receiver.shut_down(20)
    http_server.shutdown()
    http_server.server_close()
    listener.journal.close()
