"""A programmable HTTP endpoint on loopback, and rows in the database to deliver to it."""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from uuid import UUID

import sqlalchemy as sa
from evalstop_service.clock import Clock, utc_now
from evalstop_service.domain.decision_lifecycle import DecisionState, Mode
from evalstop_service.domain.run import Call, Verdict
from evalstop_service.domain.statuses import DeliveryState
from evalstop_service.observability.metrics import ServiceMetrics
from evalstop_service.security.address_policy import parse_address_policy
from evalstop_service.security.encryption import Encryption
from evalstop_service.store import endpoints, projects, tables
from evalstop_service.store.database import Database, Transaction
from evalstop_service.store.decisions import Decision
from evalstop_service.store.endpoints import Endpoint
from evalstop_service.store.ids import new_id
from evalstop_service.store.queue import leases, outbox
from evalstop_service.store.queue.attempts import BreakerLimits, ClaimedDelivery, FinishedAttempt, Result
from evalstop_service.store.queue.outbox import Delivery
from evalstop_service.store.tables import decisions, policies, runs
from evalstop_service.webhooks.delivery.mail import EmailSettings
from evalstop_service.webhooks.delivery.send import Sender
from evalstop_service.webhooks.delivery.worker import DeliveryWorker, WorkerLimits
from evalstop_service.webhooks.retry import Backoff

from tests.fixtures.projects import EVERY_EVENT

VERDICT = Verdict(Call.STOP, 1, None, "three declines")

DEADLINE_SECONDS = 60.0
EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
LOOPBACK = parse_address_policy("127.0.0.0/8, ::1/128")
"""The addresses of the tests' endpoints."""


@dataclass(frozen=True)
class ReceivedRequest:
    """A request as the endpoint received it."""

    path: str
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True)
class Reply:
    """What the endpoint answers, after waiting for `after`."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    after: threading.Event | None = None


Behavior = Callable[[BaseHTTPRequestHandler, int], Reply | None]
"""Takes the request and the number of earlier requests; None: the behavior wrote to the socket itself."""


class FakeEndpoint:
    """A real HTTP server on loopback that records what it gets."""

    def __init__(self, behavior: Behavior | Reply) -> None:
        self.behavior: Behavior = behavior if callable(behavior) else lambda _request, _number: behavior
        self.received: list[ReceivedRequest] = []
        self.open_requests = 0
        self.max_open_requests = 0
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
                """Log nothing: the tests read `received`."""

        class Server(ThreadingHTTPServer):
            request_queue_size = 128

            def handle_error(self, request: Any, client_address: Any) -> None:
                """Ignore clients that close the connection: tests do so on purpose."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/hook"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})

    def handle(self, request: BaseHTTPRequestHandler) -> None:
        """Record the request, then answer as `behavior` says."""
        body = request.rfile.read(int(request.headers.get("Content-Length", 0)))
        with self._lock:
            number = len(self.received)
            self.received.append(
                ReceivedRequest(request.path, {k.lower(): v for k, v in request.headers.items()}, body)
            )
            self.open_requests += 1
            self.max_open_requests = max(self.max_open_requests, self.open_requests)
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
                self.open_requests -= 1

    def speak_tls(self, context: ssl.SSLContext) -> None:
        """Use TLS for all further connections."""
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)

    def webhook_ids(self) -> list[str]:
        """The `webhook-id` headers received, in order."""
        return [request.headers["webhook-id"] for request in self.received]

    def __enter__(self) -> FakeEndpoint:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.released.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@dataclass(frozen=True)
class SeededProject:
    """A project with one run, written to the tables without ingestion."""

    id: UUID
    run_id: UUID
    policy_id: UUID

    def add_endpoint(self, database: Database, url: str, event_types: tuple[str, ...] = EVERY_EVENT) -> Endpoint:
        """Add an endpoint to the project."""
        with database.transaction() as tx:
            return endpoints.add_endpoint(tx, self.id, url=url, event_types=event_types, now=EPOCH)

    def add_event(
        self, tx: Transaction, number: int = 0, now: datetime = EPOCH, due_at: datetime | None = None, **options: Any
    ) -> UUID:
        """Add an event of the project's run, or of `run_id`, that carries its number; due later if `due_at` says so."""
        default = {"event_type": "run.suspected", "data": {"number": number}, "run_id": self.run_id}
        columns: dict[str, Any] = default | options
        event_id = outbox.add_event(tx, project_id=self.id, now=now, **columns)
        if due_at is not None:
            tx.execute(
                sa.update(tables.deliveries).where(tables.deliveries.c.event_id == event_id).values(due_at=due_at)
            )
        return event_id

    def add_event_of_new_run(self, tx: Transaction, number: int = 0, **options: Any) -> UUID:
        """Add an event of a new run: it waits for no other event."""
        return self.add_event(tx, number, run_id=self.insert_run(tx), **options)

    def insert_run(self, tx: Transaction) -> UUID:
        """Insert another run of the project."""
        row = self.build_run_row()
        tx.execute(sa.insert(runs).values(row))
        key: UUID = row["id"]
        return key

    @property
    def policy_columns(self) -> dict[str, Any]:
        """The policy in the rows of runs and decisions."""
        return {"policy_id": self.policy_id, "policy_name": "paper", "policy_version": 1}

    def build_run_row(self, key: UUID | None = None) -> dict[str, Any]:
        """Build the columns of a run of the project."""
        key = key or new_id()
        named = {"id": key, "name": str(key), "project_id": self.id} | self.policy_columns
        state = {"status": "running", "attempt": 1, "metrics": {}, "labels": {}, "mode": "enforce", "verdict": VERDICT}
        return named | state | {"version": 0, "created_at": EPOCH, "updated_at": EPOCH}

    def insert_decision(
        self, tx: Transaction, attempt: int | None = 1, run_id: UUID | None = None, now: datetime = EPOCH
    ) -> Decision:
        """Insert a requested decision as ingestion does; attempt None: on an attempt of its own."""
        row: dict[str, Any] = {
            "run_id": run_id or self.run_id,
            "id": new_id(),
            "project_id": self.id,
            "attempt": random.getrandbits(30) if attempt is None else attempt,
            "state": DecisionState.REQUESTED,
            "step": 5,
            "verdict": VERDICT,
            "best_checkpoint": None,
            "run_name": "ppo",
            "due_at": now,
            "created_at": now,
            "observed_probability": 1.0,
        } | self.policy_columns
        tx.execute(sa.insert(decisions).values(row))
        return Decision(**row)

    def list_deliveries(self, tx: Transaction, **filters: Any) -> list[Delivery]:
        """List all deliveries of the project, newest first."""
        return outbox.list_deliveries(tx, self.id, limit=100_000, **filters)


def seed_project(database: Database) -> SeededProject:
    """Insert a project with a policy and one run."""
    project = SeededProject(new_id(), new_id(), new_id())
    with database.transaction() as tx:
        settings: dict[str, Any] = {"default_policy": "paper", "default_mode": Mode.ENFORCE, "veto_window_seconds": 0.0}
        projects.add_project(tx, projects.Project(id=project.id, name=str(project.id), created_at=EPOCH, **settings))
        tx.execute(
            sa.insert(policies).values(
                id=project.policy_id,
                project_id=project.id,
                name="paper",
                version=1,
                document={},
                created_at=EPOCH,
            )
        )
        tx.execute(sa.insert(runs).values(project.build_run_row(project.run_id)))
    return project


def claim_deliveries(
    tx: Transaction,
    now: datetime,
    lease_seconds: float,
    limit: int,
    per_endpoint: int | None = None,
    busy: Sequence[UUID] = (),
) -> list[ClaimedDelivery]:
    """Claim due deliveries as a worker does, without a limit per endpoint by default."""
    return leases.claim_deliveries(tx, now, lease_seconds, limit, limit if per_endpoint is None else per_endpoint, busy)


def settle_delivery(
    tx: Transaction, claimed: ClaimedDelivery, result: Result, at: datetime = EPOCH, **details: Any
) -> bool:
    """Settle one attempt; return whether its lease was still held."""
    settled = leases.settle_deliveries(tx, [FinishedAttempt(claimed, result, at, **details)])
    return settled == {claimed.id: DeliveryState.WAITING}


def announce_events(database: Database, project: SeededProject, count: int = 1) -> None:
    """Add this many events in one transaction, each of a run of its own."""
    with database.transaction() as tx:
        for number in range(count):
            project.add_event_of_new_run(tx, number)


def count_deliveries_by_state(database: Database, project: SeededProject) -> Counter[str]:
    """Count the project's deliveries by state."""
    with database.reading() as tx:
        return Counter(delivery.state for delivery in project.list_deliveries(tx))


def all_settled(database: Database, project: SeededProject) -> Callable[[], bool]:
    """Return a condition: no delivery of the project is waiting."""
    return lambda: "waiting" not in count_deliveries_by_state(database, project)


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
    mail: EmailSettings | None = None,
) -> None:
    """Run a worker until the condition holds; fail after the deadline."""
    async with run_worker(
        database,
        timeout_seconds=timeout_seconds,
        mail=mail,
        backoff=backoff or Backoff(first_seconds=0.02),
        limits=limits or WorkerLimits(poll_seconds=0.02, lease_seconds=20),
        service_metrics=service_metrics,
        breaker=breaker or BreakerLimits(failures=1000),  # effectively off, unless the test is about breakers
        encryption=encryption,
    ) as running:
        await wait_until(condition, running)


@asynccontextmanager
async def run_worker(
    database: Database,
    *,
    stop: asyncio.Event | None = None,
    timeout_seconds: float = 15.0,
    mail: EmailSettings | None = None,
    clock: Clock = utc_now,
    **options: Any,
) -> AsyncIterator[asyncio.Task[None]]:
    """Run a worker until the block ends, or until `stop` is set; then wait until the worker has ended."""
    stop = stop or asyncio.Event()
    async with Sender(timeout_seconds=timeout_seconds, address_policy=LOOPBACK, mail=mail) as sender:
        worker = DeliveryWorker(database, sender, clock=clock, chance=random.Random(1), **options)
        running = asyncio.create_task(worker.run(stop))
        try:
            yield running
        finally:
            stop.set()
            await asyncio.wait_for(running, DEADLINE_SECONDS)


async def wait_until(condition: Callable[[], bool], running: asyncio.Task[Any] | None = None) -> None:
    """Wait for the condition; fail after the deadline, or when the running task ends first."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "the condition was not reached in time"
        if running is not None and running.done():
            running.result()
            raise AssertionError("the worker ended by itself")
        await asyncio.sleep(0.01)


@contextmanager
def reserve_closed_port() -> Iterator[str]:
    """Yield a URL whose port refuses connections, and reserve the port for the block."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        yield f"http://127.0.0.1:{bound.getsockname()[1]}/"
