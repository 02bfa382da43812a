"""Vetoes and pauses do not wait behind other requests: threads, connections and a place in front are theirs."""

from __future__ import annotations

import itertools
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from evalstop_service.clock import utc_now
from evalstop_service.store.database import WORK, Database

from tests.faults.servers import start_replica
from tests.fixtures.projects import create_named_key, create_project
from tests.security.served_project import create_pending_decision, serve_project
from tests.service.concurrency import count_waiting, wait_until
from tests.service.project_fixture import lift_stop_limits
from tests.service.web.api.api_calls import expect_json

WHO = {"reason": "a known dip"}


@contextmanager
def recording_writes(database: Database) -> Iterator[list[bool]]:
    """For each transaction that is begun to write, whether it is a decision's."""
    writes = list[bool]()

    def record(connection: sa.Connection) -> None:
        if connection.get_execution_options().get("evalstop_writes", False):
            writes.append(WORK.get().is_decision)

    sa.event.listen(database.engine, "begin", record)
    try:
        yield writes
    finally:
        sa.event.remove(database.engine, "begin", record)


def test_veto_and_pause_write_before_others_that_wait(embedded_database: Database) -> None:
    """A veto and a pause that are sent while others wait to write are the next to write."""
    database = embedded_database
    with serve_project(database, veto_window_seconds=3600.0) as project, ThreadPoolExecutor(64) as threads:
        admin = project.open_client()
        decision = create_pending_decision(admin)
        flooding = [project.open_client("ingest", name=f"flood-{number}") for number in range(4)]
        turns = database.turns
        assert turns is not None
        with recording_writes(database) as writes:
            with turns.take():
                opened = [
                    threads.submit(client.post, "/runs", json={"name": f"{number}-{index}"})
                    for number, client in enumerate(flooding)
                    for index in range(6)
                ]
                wait_until(lambda: count_waiting(turns) >= 4)
                ordinary = count_waiting(turns)
                vetoed = threads.submit(admin.post, f"/decisions/{decision}/veto", json=WHO)
                paused = threads.submit(admin.post, "/project/pause", json=WHO)
                wait_until(lambda: count_waiting(turns) == ordinary + 2)
                assert writes == []
            expect_json(vetoed.result(), 200)
            expect_json(paused.result(), 200)
            for response in opened:
                assert response.result().status_code in (201, 429)
    assert writes[:2] == [True, True]
    assert writes.count(True) <= 3, "the pause may put the stop on hold before the veto does"


def test_veto_is_answered_while_others_hold_all_threads_and_connections(database: Database) -> None:
    """Blocked requests, and blocked transactions on every connection that is not reserved, hold up no decision."""
    release = Event()
    with serve_project(database, veto_window_seconds=3600.0) as project, ThreadPoolExecutor(64) as threads:
        admin = project.open_client()
        decision = create_pending_decision(admin)
        reader = project.open_client("read", name="reader")
        held = 0

        def hold_connection() -> None:
            nonlocal held
            with ExitStack() as stack:
                stack.enter_context(database.reading())
                held += 1
                release.wait()

        def write() -> None:
            with database.transaction():
                pass

        try:
            for _ in range(database.ordinary_connections):
                threads.submit(hold_connection)
            wait_until(lambda: held == database.ordinary_connections)
            blocked = [threads.submit(reader.get, "/runs") for _ in range(12)]
            writing = threads.submit(write)
            if database.embedded:  # decisions await the end of whoever has the turn to write
                writing.result(timeout=25)
            expect_json(admin.post("/project/pause", json=WHO), 200)
            expect_json(admin.post(f"/decisions/{decision}/veto", json=WHO), 200)
            assert not any(response.done() for response in blocked)
        finally:
            release.set()
        assert all(response.result().status_code == 200 for response in blocked)
        writing.result()


CONNECTIONS = 24
TIMES = 5
LABELS = {f"label-{index}": "v" * 200 for index in range(100)}
EVALS_A_POST = 2_000


def write_evals(number: int) -> dict[str, Any]:
    """The largest post of evals that no earlier number wrote."""
    steps = range(number * EVALS_A_POST, (number + 1) * EVALS_A_POST)
    return {"observations": [{"metric": "eval", "step": step, "value": 0.5} for step in steps]}


FLOODS: dict[str, Callable[[int], Any]] = {
    "POST /api/v1/runs": lambda number: {"name": f"r{number}", "labels": LABELS, "params": LABELS},
    "POST /api/v1/runs/{run_id}/observations": write_evals,
    "POST /api/v1/runs/{run_id}/checkpoints": lambda number: {"step": 1, "uri": f"file:///{number}"},
    "GET /api/v1/audit/export": lambda number: None,
    "POST /mlflow/api/2.0/mlflow/runs/search": lambda number: {
        "experiment_ids": ["0"],
        "max_results": 1000,
        "filter": " AND ".join(["params.a != 'b'"] * 20),
    },
}
"""The bodies of the costliest requests that a route allows, by their number."""


@contextmanager
def flooding(clients: list[httpx.Client], route: str) -> Iterator[Counter[int]]:
    """Send requests until the end of the block; the counter has the statuses of the answers afterwards."""
    method, path = route.split()
    run_id = expect_json(clients[0].post("/api/v1/runs", json={"name": "flooded"}), 201)["id"]
    numbers, end, statuses = itertools.count(), Event(), Counter[int]()

    def flood(client: httpx.Client) -> list[int]:
        answered = []
        while not end.is_set():
            body = FLOODS[route](next(numbers))
            answered.append(client.request(method, path.format(run_id=run_id), json=body).status_code)
        return answered

    with ThreadPoolExecutor(CONNECTIONS) as threads:
        answers = [threads.submit(flood, clients[number % len(clients)]) for number in range(CONNECTIONS)]
        try:
            yield statuses
        finally:
            end.set()
    for answer in answers:
        statuses.update(answer.result())


@pytest.mark.nightly
@pytest.mark.real
@pytest.mark.parametrize("route", FLOODS)
def test_vetoes_and_pauses_are_answered_beside_a_flood(tmp_path: Path, migrated_file: Path, route: str) -> None:
    """Each veto, pause and resume of another project is carried out, and the flood meets limits, not errors."""
    shutil.copyfile(migrated_file, tmp_path / "evalstop.db")
    url = f"sqlite:///{tmp_path / 'evalstop.db'}"
    database = Database(url)
    keys = []
    for project, names in (("vetoing", ("one",)), ("flooding", ("one", "two"))):
        create_project(database, project, "enforce", 3600.0, utc_now(), "paper")
        keys += [create_named_key(database, project, name, ["admin"], utc_now())[1] for name in names]
    lift_stop_limits(database)
    database.close()
    with start_replica(tmp_path, url) as service, ExitStack() as stack:

        def open_client(key: str, path: str = "") -> httpx.Client:
            headers = {"Authorization": f"Bearer {key}"}
            client = httpx.Client(base_url=f"{service.url}{path}", headers=headers, timeout=60, trust_env=False)
            return stack.enter_context(client)

        admin = open_client(keys[0], "/api/v1")
        decisions = [create_pending_decision(admin) for _ in range(TIMES)]
        with flooding([open_client(key) for key in keys[1:]], route) as statuses:
            for decision in decisions:
                expect_json(admin.post(f"/decisions/{decision}/veto", json={"reason": "dip"}), 200)
                expect_json(admin.post("/project/pause", json={"reason": "dip"}), 200)
                expect_json(admin.post("/project/resume", json={}), 200)
    assert statuses[200] + statuses[201] > 0
    assert all(status < 500 for status in statuses), statuses
