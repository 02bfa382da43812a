"""A commit whose answer is lost, and a clock that steps back: observations are stored once, changes in order."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import httpx
import pytest
import sqlalchemy as sa
from evalstop_service.clock import Clock
from evalstop_service.ingest import Committer, Content, Message, Observations, Resumed, RunCache, running_in_thread
from evalstop_service.observability.metrics import ServiceMetrics
from evalstop_service.store import run_details, tables
from evalstop_service.store.database import Database

from tests.conftest import ClonePostgres
from tests.faults.conftest import NEEDS_OWN_POSTGRES
from tests.faults.retrying_clients import RetryingClient, build_batch, create_observations
from tests.faults.run_records import (
    assert_nothing_lost,
    create_project_and_key,
    ingest_without_faults,
    load_history,
    load_observations,
    summarize_run,
)
from tests.faults.servers import Replicas, start_replica
from tests.service.project_fixture import NOW, ProjectFixture, set_up_project

pytestmark = pytest.mark.real

STEPS = 45
TERMS = {"policy": "paper", "mode": "enforce"}


@dataclass(frozen=True)
class ProxiedService:
    """A service whose connections to its database go through a commit proxy, and a client of the service."""

    project: ProjectFixture
    service: Replicas
    proxy: CommitProxy
    client: RetryingClient


@pytest.fixture(scope="module")
def proxied(tmp_path_factory: pytest.TempPathFactory, clone_postgres: ClonePostgres) -> Iterator[ProxiedService]:
    if "TEST_DATABASE_URL" in os.environ:
        pytest.skip(NEEDS_OWN_POSTGRES)
    url = clone_postgres()
    with ExitStack() as stack:
        database = Database(url)
        stack.callback(database.close)
        project, key = create_project_and_key(database)
        proxy, proxied_url = stack.enter_context(start_commit_proxy(url))
        service = stack.enter_context(start_replica(tmp_path_factory.mktemp("service"), proxied_url))
        yield ProxiedService(project, service, proxy, stack.enter_context(RetryingClient(key, lambda: service.url)))


def test_commit_without_an_answer_counts_observations_once(
    proxied: ProxiedService, embedded_database: Database
) -> None:
    """If the service gets no answer to its commit, its retry reports duplicates and the run is as without a fault."""
    run_id = proxied.client.post("/runs", TERMS | {"name": "answer-lost"})["id"]
    cuts_before = proxied.proxy.cut_count
    for step in range(STEPS):
        # Before the stop at step 32: what follows a stop changes the run too, and a save that finds it changed stores
        # nothing. Losing the answer to that one is no fault.
        answer_lost = step in range(3, 32, 6)
        if answer_lost:
            proxied.proxy.arm()
        receipt = proxied.client.post(f"/runs/{run_id}/observations", build_batch(create_observations(step)))
        assert (receipt["accepted"], receipt["duplicates"]) == ((0, 3) if answer_lost else (3, 0))
    assert proxied.proxy.cut_count == cuts_before + 5
    assert proxied.client.refusals == []
    assert_nothing_lost(
        proxied.project, run_id, [create_observations(step) for step in range(STEPS)], embedded_database
    )


def test_replica_killed_after_its_commit_loses_nothing(proxied: ProxiedService, embedded_database: Database) -> None:
    """If a replica is killed between commit and response, the repeated post reports duplicates and changes nothing."""
    run_id = proxied.client.post("/runs", TERMS | {"name": "killed"})["id"]
    (program,) = proxied.service.programs
    cuts_before = proxied.proxy.cut_count
    for step in range(STEPS):
        killed = step in (10, 32)  # step 32 causes the stop
        if killed:
            pid = program.pid
            proxied.proxy.arm(lambda pid=pid: os.kill(pid, signal.SIGKILL))  # type: ignore[misc]
            with pytest.raises(httpx.TransportError):
                proxied.client.post_once(f"/runs/{run_id}/observations", build_batch(create_observations(step)))
            proxied.service.restart(program)
        receipt = proxied.client.post(f"/runs/{run_id}/observations", build_batch(create_observations(step)))
        assert (receipt["accepted"], receipt["duplicates"]) == ((0, 3) if killed else (3, 0))
    assert proxied.proxy.cut_count == cuts_before + 2
    assert_nothing_lost(
        proxied.project, run_id, [create_observations(step) for step in range(STEPS)], embedded_database
    )


COMMIT_MESSAGES = (b"COMMIT\x00", b"COMMIT;\x00")
OBSERVATIONS = b"\x00\x00\x00\x05proxy"
"""A metric's name in a statement that inserts observations, which may be a transaction by itself."""
IDLE, IN_TRANSACTION = b"Z\x00\x00\x00\x05I", b"Z\x00\x00\x00\x05T"
"""ReadyForQuery, which ends an answer: outside a transaction, or inside one."""


class CommitProxy:
    """A TCP proxy in front of a PostgreSQL that listens on a Unix socket.

    When armed, it forwards the next commit of observations (a COMMIT after a statement that inserts some, or such a
    statement by itself), waits for PostgreSQL's answer, does not forward it, calls `action` and closes the connection.
    What the service commits in the background passes. `cut_count` counts the connections closed.
    """

    def __init__(self, listener: socket.socket, server: Path) -> None:
        self._listener, self._server = listener, server
        self._lock = threading.Lock()
        self._action: Callable[[], None] | None = None
        self._sockets: list[socket.socket] = []
        self.cut_count = 0

    def arm(self, action: Callable[[], None] = lambda: None) -> None:
        """Close the next connection that commits observations, after calling `action`."""
        with self._lock:
            self._action = action

    def accept(self) -> None:
        """Forward connections until the listening socket is closed."""
        while True:
            try:
                client = self._listener.accept()[0]
            except OSError:
                return
            server_socket = socket.socket(socket.AF_UNIX)
            with self._lock:
                self._sockets += [client, server_socket]
            try:
                server_socket.connect(str(self._server))
            except OSError:
                client.close()
                continue
            threading.Thread(target=self._forward_requests, args=(client, server_socket), daemon=True).start()

    def close(self) -> None:
        """Close all connections."""
        for each in (self._listener, *self._sockets):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _forward_requests(self, client: socket.socket, server_socket: socket.socket) -> None:
        commit = threading.Event()
        answers = threading.Thread(target=self._forward_answers, args=(server_socket, client, commit), daemon=True)
        answers.start()
        inserts = False
        with suppress(OSError):
            while data := client.recv(65536):
                inserts = inserts or OBSERVATIONS in data
                commits = data.endswith(COMMIT_MESSAGES)
                if inserts and (commits or OBSERVATIONS in data) and self._is_armed():
                    commit.set()
                if commits:
                    inserts = False
                server_socket.sendall(data)
        _shut_down(client, server_socket)

    def _forward_answers(self, server_socket: socket.socket, client: socket.socket, commit: threading.Event) -> None:
        with suppress(OSError):
            while data := server_socket.recv(65536):
                if data.endswith(IN_TRANSACTION):
                    commit.clear()
                if commit.is_set() and data.endswith(IDLE):
                    with self._lock:
                        action, self._action = self._action, None
                    if action is not None:
                        action()
                        self.cut_count += 1
                        break
                client.sendall(data)
        _shut_down(client, server_socket)

    def _is_armed(self) -> bool:
        with self._lock:
            return self._action is not None


def _shut_down(*sockets: socket.socket) -> None:
    for each in sockets:
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


@contextmanager
def start_commit_proxy(database_url: str) -> Iterator[tuple[CommitProxy, str]]:
    """Start a proxy in front of this database; yields it and the database's URL through it."""
    url = sa.make_url(database_url)
    server = Path(str(url.query["host"])) / ".s.PGSQL.5432"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        proxy = CommitProxy(listener, server)
        thread = threading.Thread(target=proxy.accept)
        thread.start()
        port: int = listener.getsockname()[1]
        proxied = url.set(drivername="postgresql", host="127.0.0.1", port=port, query={"sslmode": "disable"})
        try:
            yield proxy, proxied.render_as_string(hide_password=False)
        finally:
            proxy.close()
            thread.join()


CLOCK_STEPS = 80
HOUR = timedelta(hours=1)


def create_stepping_clock() -> Clock:
    """A clock that steps back an hour at every third reading and stands still in between."""
    readings = itertools.count()
    return lambda: NOW - HOUR * (next(readings) // 3)


@pytest.mark.nightly
def test_clock_steps_in_two_processes_change_nothing(database: Database, embedded_database: Database) -> None:
    """Two processes whose clock keeps stepping back store the same run and verdicts as one with a correct clock."""
    project, clock = set_up_project(database), create_stepping_clock()
    run = project.open_run(policy="paper", mode="enforce")
    processes = [Committer(database, RunCache(), clock, ServiceMetrics()) for _ in range(2)]
    middle, steps = CLOCK_STEPS // 2, [Observations(tuple(create_observations(step))) for step in range(CLOCK_STEPS)]
    messages: list[Content] = [*steps[:middle], Resumed(middle - 10), *steps[middle - 9 :]]
    versions = []
    with running_in_thread(processes[0]), running_in_thread(processes[1]):
        for number, message in enumerate(messages):
            receipt = processes[number % 2].submit_and_wait(Message(project.id, run.id, message))
            versions.append((receipt.run.version, receipt.run.updated_at))
    other, expected = ingest_without_faults(embedded_database, messages)
    assert len({version for version, _ in versions}) == len(versions)
    assert versions == sorted(versions, key=lambda version: version[0])
    assert summarize_run(project.load_run(run)) == summarize_run(expected)
    assert load_observations(project, run) == load_observations(other, expected)
    assert load_history(project, run) == load_history(other, expected)
    with database.reading() as tx:
        verdict_names = [change.verdict for change in run_details.list_verdicts(tx, run.id)]
        times = list(tx.execute(sa.select(tables.verdicts.c.at).order_by(tables.verdicts.c.sequence)).scalars())
    assert times == sorted(times, reverse=True)
    assert verdict_names == [verdict for _, verdict in load_history(other, expected)["verdicts"]][::-1]
