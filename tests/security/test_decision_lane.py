"""Vetoes and pauses do not wait behind other requests: threads, connections and a place in front are theirs."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from threading import Event

import sqlalchemy as sa
from evalstop_service.store.database import WORK, Database

from tests.security.served_project import create_pending_decision, serve_project
from tests.service.concurrency import count_waiting, wait_until
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
