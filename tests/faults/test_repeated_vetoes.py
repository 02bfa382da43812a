"""A veto that a fault refused is heard when it is repeated: no stop is handed over in between."""

from __future__ import annotations

import os
import random
import signal
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from evalstop_service.store import schema
from evalstop_service.store.database import Database

from tests.acceptance.fake_receiver import FakeReceiver, start_fake_receiver
from tests.acceptance.programs import FAST_DELIVERY, Program
from tests.faults.conftest import NEEDS_OWN_POSTGRES
from tests.faults.retrying_clients import RetryingClient, wait_until
from tests.faults.run_records import create_project_and_key
from tests.faults.servers import RestartablePostgres, start_restartable_postgres
from tests.faults.surroundings import build_clock_library, build_small_disk_command, fill_disk
from tests.service.web.api.api_calls import FALLING

pytestmark = pytest.mark.real

WINDOW_SECONDS = 4.0
RUNS = 2
RECONNECT_SECONDS = 1.0
"""How long `serve` stays stopped after an outage: the worker is back before it can extend windows."""

CLOCK_BEHIND_SECONDS = {"late clock": 900, "early clock": -900}
VETO = {"reason": "it only dips"}


@dataclass(frozen=True)
class Installation:
    """The programs of one installation, the same one twice for `up`, and what its faults use."""

    server: Program
    worker: Program
    url: str
    key: str
    postgres: RestartablePostgres | None = None
    filler: Path = Path()

    def send(self, method: str, path: str, body: dict[str, Any], timeout_seconds: float = 60.0) -> httpx.Response:
        """Send a request once; raises httpx.TransportError without an answer within the time."""
        headers = {"Authorization": f"Bearer {self.key}"}
        url = f"{self.url}/api/v1{path}"
        return httpx.request(method, url, json=body, headers=headers, timeout=timeout_seconds, trust_env=False)


def start_on_postgres(stack: ExitStack, folder: Path, fault: str) -> Installation:
    """Start `serve` and `deliver` on a PostgreSQL of their own."""
    if "TEST_DATABASE_URL" in os.environ:
        pytest.skip(NEEDS_OWN_POSTGRES)
    postgres = stack.enter_context(start_restartable_postgres())
    database = Database(postgres.url)
    schema.upgrade_schema(database)
    _, key = create_project_and_key(database)
    database.close()
    environment, clock = {"EVALSTOP_DATABASE_URL": postgres.url, **FAST_DELIVERY}, {}
    if fault in CLOCK_BEHIND_SECONDS:
        library, file = build_clock_library(folder)
        file.write_bytes(struct.pack("l", CLOCK_BEHIND_SECONDS[fault]))
        clock["LD_PRELOAD"] = str(library)
    server = Program(folder / "serve.log", "serve", "--json", "--port", "0", **environment)
    worker = Program(folder / "deliver.log", "deliver", "--json", **environment, **clock)
    stack.callback(server.kill)
    stack.callback(worker.kill)
    worker.start()
    return Installation(server, worker, server.start_server()["url"], key, postgres)


def start_on_sqlite(stack: ExitStack, folder: Path, fault: str) -> Installation:
    """Start `up`, on a small disk if that is to be filled."""
    data = folder / "data"
    data.mkdir()
    under = build_small_disk_command(data) if fault == "full disk" else []
    command = ("up", "--json", "--port", "0", "--data-folder", str(data))
    program = Program(folder / "up.log", *command, under=under, **FAST_DELIVERY)
    stack.callback(program.kill)
    started = program.start_server()
    filler = Path(f"/proc/{program.pid}/root{data}/filler")
    return Installation(program, program, started["url"], started["key"], filler=filler)


def set_up_project(installation: Installation, client: RetryingClient, receiver: FakeReceiver) -> None:
    """Allow stops after a window, and send them to the receiver."""
    limits = {"stops_per_hour": None, "stops_share": None, "held_out_share": 0, "max_mode": "enforce"}
    settings = limits | {"veto_window_seconds": WINDOW_SECONDS}
    installation.send("PATCH", "/project", settings).raise_for_status()
    endpoint = {"url": receiver.url, "event_types": ["run.stop_requested"]}
    receiver.secret = client.post("/endpoints", endpoint)["secret"]


def open_stopping_run(client: RetryingClient, name: str) -> tuple[str, dict[str, Any]]:
    """A run whose evals fall, and the decision to stop it."""
    run_id = client.post("/runs", {"name": name, "policy": "paper", "mode": "enforce"})["id"]
    client.post(f"/runs/{run_id}/checkpoints", {"step": 1, "uri": "file:///1"})
    decision = client.post(f"/runs/{run_id}/observations", {"observations": FALLING})["decision"]
    return run_id, client.get(f"/decisions/{decision['id']}")


@contextmanager
def cause_fault(installation: Installation, fault: str) -> Iterator[None]:
    """Cause a fault until the end of the block."""
    if installation.postgres is not None and (fault == "outage" or fault in CLOCK_BEHIND_SECONDS):
        installation.postgres.stop(signal.SIGQUIT)
        yield
        with stopped(installation.server):
            installation.postgres.start()
            time.sleep(RECONNECT_SECONDS)
    elif fault == "full disk":
        fill_disk(installation.filler)
        yield
        installation.filler.unlink()
    else:
        with stopped(installation.worker if fault == "worker stopped" else installation.server):
            yield


@contextmanager
def stopped(program: Program) -> Iterator[None]:
    """Stop a process until the end of the block, as a suspended machine does."""
    os.kill(program.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(program.pid, signal.SIGCONT)


def is_refused(installation: Installation, decision_id: str) -> bool:
    """Send a veto once; whether it was refused or not answered in a fifth of the window."""
    try:
        answer = installation.send("POST", f"/decisions/{decision_id}/veto", VETO, 0.2 * WINDOW_SECONDS)
    except httpx.TransportError:
        return True
    return answer.status_code >= 500


def check_repeated_vetoes(
    installation: Installation, fault: str, ends_after: float, client: RetryingClient, receiver: FakeReceiver
) -> list[str]:
    """Refuse vetoes by a fault that ends at this share of the window, and repeat them; returns the runs."""
    opened = [open_stopping_run(client, f"{ends_after}-{number}") for number in range(RUNS)]
    assert {decision["state"] for _, decision in opened} == {"pending"}
    first_end = min(datetime.fromisoformat(decision["due_at"]) for _, decision in opened)

    def wait_for_share(share: float) -> None:
        passed = (share - 1) * WINDOW_SECONDS
        wait_until(lambda: (datetime.now(UTC) - first_end).total_seconds() > passed, "the window passes")

    def repeat_vetoes() -> None:
        assert {data["run"]["id"] for data in receiver.events("run.stop_requested")}.isdisjoint(dict(opened))
        for _, decision in opened:
            assert client.post(f"/decisions/{decision['id']}/veto", VETO)["state"] == "vetoed"

    with cause_fault(installation, fault):
        if fault != "worker stopped":
            assert all(is_refused(installation, decision["id"]) for _, decision in opened)
        wait_for_share(ends_after)
        if fault == "worker stopped":  # the windows have ended, and nobody was handed the stops
            repeat_vetoes()
    if fault != "worker stopped":
        wait_for_share(ends_after + 0.5)
        repeat_vetoes()
    return [run_id for run_id, _ in opened]


@pytest.mark.parametrize(
    ("database", "fault"),
    [
        pytest.param("PostgreSQL", "outage", marks=pytest.mark.nightly),
        pytest.param("SQLite", "full disk", marks=pytest.mark.nightly),
        *(
            pytest.param("PostgreSQL", fault, marks=pytest.mark.chaos)
            for fault in ("late clock", "early clock", "server stopped", "worker stopped")
        ),
        pytest.param("SQLite", "server stopped", marks=pytest.mark.chaos),
    ],
)
def test_refused_veto_is_heard_when_it_is_repeated(tmp_path: Path, database: str, fault: str) -> None:
    """No stop is handed over before its veto is repeated, nor after it, whether the fault outlives the window or not; a
    stop without a veto is."""
    start = start_on_postgres if database == "PostgreSQL" else start_on_sqlite
    with ExitStack() as stack:
        receiver = stack.enter_context(start_fake_receiver(random.Random(1)))
        installation = start(stack, tmp_path, fault)
        client = stack.enter_context(RetryingClient(installation.key, lambda: installation.url))
        set_up_project(installation, client, receiver)
        vetoed = [
            run_id
            for ends_after in (0.9, 1.3)
            for run_id in check_repeated_vetoes(installation, fault, ends_after, client, receiver)
        ]
        installation.send("PATCH", "/project", {"veto_window_seconds": 0}).raise_for_status()
        unvetoed, _ = open_stopping_run(client, "unvetoed")
        wait_until(lambda: bool(receiver.events("run.stop_requested")), "the stop without a veto arrives")
        assert {data["run"]["id"] for data in receiver.events("run.stop_requested")} == {unvetoed}
        decisions = client.get("/decisions", state="vetoed")["items"]
        assert {decision["run_id"] for decision in decisions} == set(vetoed)
