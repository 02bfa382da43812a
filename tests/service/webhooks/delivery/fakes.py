"""An HTTP endpoint on loopback that behaves as badly as it is told, and rows to deliver to it."""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from uuid import UUID

import sqlalchemy as sa
from evalstop_service.observability.metrics import ServiceMetrics
from evalstop_service.rules.decision_lifecycle import DecisionState
from evalstop_service.rules.run_results import Call, Verdict
from evalstop_service.security.address_policy import parse_address_policy
from evalstop_service.security.encryption import Encryption
from evalstop_service.store import endpoints
from evalstop_service.store.database import Database, Transaction
from evalstop_service.store.decisions import Decision
from evalstop_service.store.endpoints import Endpoint
from evalstop_service.store.ids import new_id
from evalstop_service.store.queue import deliveries, leases, outbox
from evalstop_service.store.queue.attempts import ClaimedDelivery, FinishedAttempt, Result
from evalstop_service.store.queue.breakers import BreakerLimits
from evalstop_service.store.queue.deliveries import Delivery
from evalstop_service.store.tables import decisions, policies, projects, runs
from evalstop_service.webhooks.delivery.mail import MailSettings
from evalstop_service.webhooks.delivery.send import Sender
from evalstop_service.webhooks.delivery.worker import DeliveryWorker, WorkerLimits
from evalstop_service.webhooks.retry import Backoff

from tests.fixtures.subscriptions import EVERY_EVENT

VERDICT = Verdict(Call.STOP, 1, None, "three declines")

DEADLINE_SECONDS = 60.0
EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
LOOPBACK = parse_address_policy("127.0.0.0/8, ::1/128")
"""Where the endpoints of the tests are."""


@dataclass(frozen=True)
class Received:
    """One request as it arrived."""

    path: str
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True)
class Reply:
    """What the endpoint answers; `after` is waited for first."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    after: threading.Event | None = None


Behavior = Callable[[BaseHTTPRequestHandler, int], Reply | None]
"""Given the request and how many came before it; None: the behavior has written to the socket itself."""


class FakeEndpoint:
    """A real HTTP server on loopback that records what it gets."""

    def __init__(self, behavior: Behavior | Reply) -> None:
        self.behavior: Behavior = behavior if callable(behavior) else lambda _request, _number: behavior
        self.received: list[Received] = []
        self.under_way = 0
        self.most_under_way = 0
        self.released = threading.Event()
        self._lock = threading.Lock()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                fake.handle(self)

            def do_GET(self) -> None:
                fake.handle(self)

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name it has there
                """Quiet: the tests read `received`."""

        class Server(ThreadingHTTPServer):
            request_queue_size = 128

            def handle_error(self, request: Any, client_address: Any) -> None:
                """Clients that hang up are part of the game."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/hook"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})

    def handle(self, request: BaseHTTPRequestHandler) -> None:
        """Record the request, then behave."""
        body = request.rfile.read(int(request.headers.get("Content-Length", 0)))
        with self._lock:
            number = len(self.received)
            self.received.append(Received(request.path, {k.lower(): v for k, v in request.headers.items()}, body))
            self.under_way += 1
            self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            reply = self.behavior(request, number)
            if reply is None:
                request.close_connection = True
                return
            if reply.after is not None:
                reply.after.wait(DEADLINE_SECONDS)
            request.send_response(reply.status)
            for name, value in reply.headers.items():
                request.send_header(name, value)
            request.send_header("Content-Length", str(len(reply.body)))
            request.end_headers()
            request.wfile.write(reply.body)
        finally:
            with self._lock:
                self.under_way -= 1

    def speak_tls(self, context: ssl.SSLContext) -> None:
        """Speak TLS from now on."""
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)

    def has(self, count: int) -> bool:
        """Whether so many requests have arrived."""
        return len(self.received) == count

    def ids(self) -> list[str]:
        """The `webhook-id`s received, in order."""
        return [one.headers["webhook-id"] for one in self.received]

    def __enter__(self) -> FakeEndpoint:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.released.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@dataclass(frozen=True)
class Scene:
    """A project with a run, to announce events of."""

    project_id: UUID
    run_id: UUID
    policy_id: UUID

    def endpoint(self, database: Database, url: str, event_types: tuple[str, ...] = EVERY_EVENT) -> Endpoint:
        """A new endpoint of the project."""
        with database.transaction() as tx:
            return endpoints.add_endpoint(tx, self.project_id, url=url, event_types=event_types, now=EPOCH)

    def announce(self, tx: Transaction, number: int = 0, now: datetime = EPOCH, **options: Any) -> UUID:
        """An event of the scene's run, or of `run_id`, that tells its number."""
        about = {"type": "run.suspected", "data": {"number": number}, "run_id": self.run_id}
        terms: dict[str, Any] = about | options
        return outbox.add_event(tx, project_id=self.project_id, now=now, **terms)

    def apart(self, tx: Transaction, number: int = 0, **options: Any) -> UUID:
        """An event of a run of its own, which has to wait for no other."""
        return self.announce(tx, number, run_id=self.another_run(tx), **options)

    def another_run(self, tx: Transaction) -> UUID:
        """One more run of the project."""
        row = self.run_row()
        tx.execute(sa.insert(runs).values(row))
        key: UUID = row["id"]
        return key

    def run_row(self, key: UUID | None = None) -> dict[str, Any]:
        """What a run of the project is made of."""
        key = key or new_id()
        named = {"id": key, "name": str(key), "project_id": self.project_id, "policy_id": self.policy_id}
        told = {"status": "running", "attempt": 1, "metrics": {}, "labels": {}, "mode": "enforce", "verdict": VERDICT}
        return named | told | {"version": 0, "created_at": EPOCH, "updated_at": EPOCH}

    def decision(
        self, tx: Transaction, due_at: datetime = EPOCH, attempt: int | None = 1, now: datetime = EPOCH
    ) -> Decision:
        """A pending decision on an attempt of the run, as ingest leaves it; None: on one of its own."""
        row: dict[str, Any] = {
            "run_id": self.run_id,
            "id": new_id(),
            "project_id": self.project_id,
            "attempt": random.getrandbits(30) if attempt is None else attempt,
            "state": DecisionState.PENDING,
            "step": 5,
            "verdict": VERDICT,
            "best_checkpoint": None,
            "policy_id": self.policy_id,
            "due_at": due_at,
            "created_at": now,
            "observed_probability": 1.0,
        }
        tx.execute(sa.insert(decisions).values(row))
        return Decision(**row, run_name="ppo", policy_name="paper", policy_version=1)

    def all(self, tx: Transaction, **filters: Any) -> list[Delivery]:
        """All deliveries of the project, newest first."""
        return deliveries.list_deliveries(tx, self.project_id, limit=100_000, **filters)


def a_scene(database: Database) -> Scene:
    """A project of its own with one run."""
    scene = Scene(new_id(), new_id(), new_id())
    with database.transaction() as tx:
        tx.execute(
            sa.insert(projects).values(
                id=scene.project_id,
                name=str(scene.project_id),
                default_policy="paper",
                default_mode="enforce",
                veto_window_seconds=0,
                created_at=EPOCH,
            )
        )
        tx.execute(
            sa.insert(policies).values(
                id=scene.policy_id,
                project_id=scene.project_id,
                name="paper",
                version=1,
                document={},
                created_at=EPOCH,
            )
        )
        tx.execute(sa.insert(runs).values(scene.run_row(scene.run_id)))
    return scene


def take(
    tx: Transaction,
    now: datetime,
    lease_seconds: float,
    limit: int,
    per_endpoint: int | None = None,
    room: dict[UUID, int] | None = None,
) -> list[ClaimedDelivery]:
    """Claim what is due, as a worker does; of one endpoint as much as there is, unless told otherwise."""
    return leases.claim_deliveries(tx, now, lease_seconds, limit, limit if per_endpoint is None else per_endpoint, room)


def settle(tx: Transaction, claimed: ClaimedDelivery, result: Result, at: datetime = EPOCH, **ended: Any) -> bool:
    """Settle one attempt; whether the lease still held."""
    return leases.settle_deliveries(tx, [FinishedAttempt(claimed, result, at, **ended)]).kept == {claimed.id}


def announce(database: Database, scene: Scene, count: int = 1) -> None:
    """So many events, each of a run of its own, in one transaction."""
    with database.transaction() as tx:
        for number in range(count):
            scene.apart(tx, number)


def states(database: Database, scene: Scene) -> Counter[str]:
    """How many deliveries of the project are in which state."""
    with database.reading() as tx:
        return Counter(one.state for one in scene.all(tx))


def settled(database: Database, scene: Scene) -> Callable[[], bool]:
    """The condition that nothing waits any more."""
    return lambda: "waiting" not in states(database, scene)


def utc_now() -> datetime:
    """The clock of the tests that need a real one."""
    return datetime.now(UTC)


async def deliver_until(
    condition: Callable[[], bool],
    database: Database,
    *,
    backoff: Backoff | None = None,
    limits: WorkerLimits | None = None,
    timeout_seconds: float = 5.0,
    service_metrics: ServiceMetrics | None = None,
    breaker: BreakerLimits | None = None,
    encryption: Encryption | None = None,
    mail: MailSettings | None = None,
) -> None:
    """Run a worker until the condition holds, then stop it gracefully; fails when that takes too long."""
    stop = asyncio.Event()
    async with Sender(timeout_seconds=timeout_seconds, address_policy=LOOPBACK, mail=mail) as sender:
        worker = DeliveryWorker(
            database,
            sender,
            clock=utc_now,
            chance=random.Random(1),
            backoff=backoff or Backoff(first_seconds=0.02),
            limits=limits or WorkerLimits(poll_seconds=0.02, lease_seconds=20),
            service_metrics=service_metrics,
            breaker=breaker or BreakerLimits(failures=1000),  # the tests of what fails are of something else
            encryption=encryption,
        )
        running = asyncio.create_task(worker.run(stop))
        try:
            await reach(condition, running)
        finally:
            stop.set()
            await asyncio.wait_for(running, DEADLINE_SECONDS)


async def reach(condition: Callable[[], bool], running: asyncio.Task[Any] | None = None) -> None:
    """Wait for the condition, or fail after the deadline, or when what is running ends before."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "the condition was not reached in time"
        if running is not None and running.done():
            running.result()
            raise AssertionError("the worker ended by itself")
        await asyncio.sleep(0.01)


@contextmanager
def closed_port() -> Iterator[str]:
    """A URL where nobody listens, and nobody will while the block runs."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        yield f"http://127.0.0.1:{holder.getsockname()[1]}/"
