"""A direct connection that ends while a statement is under way on it: whoever waits is told, however it ended."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import suppress

import pytest
import sqlalchemy as sa
import uvloop
from evalstop_service.store.compare_and_save import Stroke
from evalstop_service.store.database import Database, Transaction
from evalstop_service.store.direct import Direct

from tests.service.scenes import NOW

DEADLINE_SECONDS = 30.0
SERVER = """
SELECT pid FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid() AND wait_event = :waits_for
"""


@pytest.mark.skipif("TEST_DATABASE_URL" in os.environ, reason="this stops a process of a PostgreSQL on this machine")
@pytest.mark.parametrize("unread", [True, False], ids=["unread", "read"])
def test_a_server_that_ends(postgres_database: Database, unread: bool) -> None:
    """A server process that ends is noticed, also when what it was sent stays unread: the socket reports an error then,
    for which the event loop calls the connection's reader once, and never again.
    """
    assert uvloop.run(_ended_under_way(postgres_database, unread=unread)) is None


async def _ended_under_way(database: Database, *, unread: bool) -> bool | None:
    """What becomes of a stroke whose server process bids farewell and ends before it has answered."""
    loop = asyncio.get_running_loop()
    direct, saved = Direct(database, 1, lambda: None), loop.create_future()
    await direct.open()
    try:
        with database.transaction() as tx:
            if unread:
                server = _server(tx, "ClientRead")
                os.kill(server, signal.SIGSTOP)
                direct.save(Stroke([], [], NOW).parameters, saved.set_result)
            else:
                tx.exec_driver_sql("LOCK TABLE runs")
                direct.save(Stroke([], [], NOW).parameters, saved.set_result)
                server = _server(tx, "relation")
            tx.execute(sa.text("SELECT pg_terminate_backend(:server)"), {"server": server})
            os.kill(server, signal.SIGCONT)
            _wait_for_end(server)  # meanwhile the loop is busy: it finds farewell and end together
            await asyncio.wait([saved], timeout=DEADLINE_SECONDS)
            assert saved.done(), "nobody was told"
            answer: bool | None = saved.result()
            return answer
    finally:
        await direct.close()


def _wait_for_end(pid: int) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    with suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.kill(pid, 0)
            time.sleep(0.01)
        raise TimeoutError(f"process {pid} does not end")


def _server(tx: Transaction, waits_for: str) -> int:
    """The other session of this database, once it waits for this."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while (found := tx.execute(sa.text(SERVER), {"waits_for": waits_for}).scalar_one_or_none()) is None:
        assert time.monotonic() < deadline, f"no session waits for {waits_for}"
        time.sleep(0.01)
    return int(found)
