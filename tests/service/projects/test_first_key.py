"""The key that the first start creates."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from evalstop_service.clock import utc_now
from evalstop_service.projects import api_keys
from evalstop_service.store.database import Database

from tests.faults.retrying_clients import wait_until

COUNT_WAITING = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"


def test_processes_that_start_together_create_one_key(postgres_database: Database) -> None:
    """Of two processes that start at the same moment, one creates the first key, and the other starts without."""
    database = postgres_database

    def count_waiting() -> int:
        with database.reading() as tx:
            count: int = tx.exec_driver_sql(COUNT_WAITING).scalar_one()
        return count

    with ThreadPoolExecutor(2) as threads:
        with database.transaction() as tx:
            tx.exec_driver_sql("LOCK TABLE keys IN SHARE ROW EXCLUSIVE MODE")
            starts = [threads.submit(api_keys.create_first_key, database, utc_now()) for _ in range(2)]
            wait_until(lambda: count_waiting() == 2, "both wait")
        created = [start.result() for start in starts]
    assert [secret is None for secret in created] in ([True, False], [False, True])
