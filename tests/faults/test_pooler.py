"""The commands behind a real pgbouncer that gives each transaction another session."""

from __future__ import annotations

import os
import pwd
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psycopg
import pytest
import sqlalchemy as sa
from evalstop_service.store import schema
from evalstop_service.store.database import IS_POOLED, Database

from tests.acceptance.fake_receiver import start_fake_receiver
from tests.acceptance.programs import FAST_DELIVERY, Program
from tests.faults.retrying_clients import RetryingClient
from tests.faults.run_records import create_project_and_key
from tests.faults.test_many_stops import build_scores
from tests.fixtures.postgres_server import format_conninfo
from tests.service.concurrency import run_concurrently

pytestmark = pytest.mark.real

DEADLINE_SECONDS = 90.0
POLICIES = ("paper", "default", "cautious")


@pytest.fixture
def pooled_url(empty_postgres_url: str) -> Iterator[str]:
    """The URL of a database without tables, through pgbouncer."""
    with start_pgbouncer(empty_postgres_url) as url:
        yield url


def test_pooler_is_recognized(pooled_url: str, empty_postgres_url: str) -> None:
    """A database knows from its first connection whether transactions keep their session."""
    for url, expected in ((pooled_url, True), (empty_postgres_url, False)):
        database = Database(url)
        assert database.learned[IS_POOLED] is expected
        database.close()


def test_every_command_works_behind_a_pooler(pooled_url: str, tmp_path: Path) -> None:
    """Migrations, runs that are opened at once, posts, checkpoints, a stop and restarts: no request is refused."""
    with ExitStack() as stack:
        database = Database(pooled_url)
        stack.callback(database.close)
        assert run_concurrently(*[lambda: schema.upgrade_schema(database)] * 2) == []
        _, key = create_project_and_key(database)
        environment = FAST_DELIVERY | {"EVALSTOP_DATABASE_URL": pooled_url}
        serve = Program(tmp_path / "serve.log", "serve", "--json", "--port", "0", **environment)
        deliver = Program(tmp_path / "deliver.log", "deliver", **environment)
        for program in (serve, deliver):
            stack.callback(program.kill)
            program.launch()
        urls = [str(serve.wait_until_server_ready()["url"])]
        deliver.wait_until_ready()
        receiver = stack.enter_context(start_fake_receiver(random.Random(1)))
        client = stack.enter_context(RetryingClient(key, lambda: urls[-1]))
        wanted = {"url": receiver.url, "event_types": ["run.stop_requested"]}
        receiver.secret = client.post("/endpoints", wanted)["secret"]

        def train(number: int) -> str:
            """Open a run, let its eval rise and fall; returns the run's id."""
            opened = {"name": f"run-{number}", "policy": POLICIES[number % len(POLICIES)], "mode": "enforce"}
            run_id = str(client.post("/runs", opened)["id"])
            for step in range(12):
                client.post(f"/runs/{run_id}/observations", build_scores(step, float(min(step, 12 - step))))
            client.post(f"/runs/{run_id}/observations", build_scores(3, 3.0))  # known already
            client.post(f"/runs/{run_id}/checkpoints", {"step": 6, "uri": "file:///6"})
            return run_id

        with ThreadPoolExecutor(6) as threads:
            run_ids = list(threads.map(train, range(6)))
        stopped = {run_ids[0], run_ids[3]}  # of the policy `paper`
        requests = receiver.events
        assert receiver.wait_for(
            lambda: stopped <= {data["run"]["id"] for data in requests("run.stop_requested")}, DEADLINE_SECONDS
        )
        for data in requests("run.stop_requested"):
            reported = client.post(f"/decisions/{data['decision']['id']}/report", {"state": "confirmed"})
            assert reported["state"] == "confirmed"
        serve.terminate()
        serve.wait(DEADLINE_SECONDS)
        urls.append(str(serve.start_server()["url"]))
        for run_id in run_ids:
            assert client.get(f"/runs/{run_id}")["best_checkpoint"]["step"] == 6
            assert len(client.get(f"/runs/{run_id}/observations", metric="eval")["items"]) == 12
        assert (client.refusals, client.connection_errors) == ([], 0)
        for program in (serve, deliver):
            assert "Traceback" not in program.read_log()


def test_isolation_is_the_services_own_behind_a_pooler(pooled_url: str) -> None:
    """Transactions through a pooler name their isolation level, since no setting of a session lasts there."""
    database = Database(pooled_url)
    with database.transaction() as tx:
        tx.exec_driver_sql(f"ALTER DATABASE {tx.engine.url.database} SET default_transaction_isolation TO serializable")
    database.close()
    database = Database(pooled_url)
    for _ in range(3):
        with database.transaction() as tx:
            assert tx.execute(sa.text("SHOW transaction_isolation")).scalar_one() == "read committed"
    database.close()


PROGRAM = shutil.which("pgbouncer", path=os.environ.get("PATH", "") + ":/usr/sbin")

START_SECONDS = 60.0

CONFIGURATION = """
[databases]
* = host={host} port={port} user={user} {password}

[pgbouncer]
listen_addr =
listen_port = 6432
unix_socket_dir = {folder}
auth_type = any
pool_mode = transaction
default_pool_size = 6
max_client_conn = 200
server_round_robin = 1
query_wait_timeout = 60
"""


@contextmanager
def start_pgbouncer(url: str) -> Iterator[str]:
    """Start a pooler before the server of this URL; yields the URL of the same database through it."""
    assert PROGRAM is not None, "there is no pgbouncer; run `make system-packages`"
    server = sa.make_url(url)
    user = "postgres" if os.geteuid() == 0 else None  # pgbouncer refuses to run as root, as PostgreSQL does
    folder = Path(tempfile.mkdtemp(prefix="evalstop-pgbouncer-"))
    try:
        configuration = folder / "pgbouncer.ini"
        configuration.write_text(
            CONFIGURATION.format(
                host=server.query.get("host") or server.host,
                port=server.port or 5432,
                user=server.username,
                password=f"password={server.password}" if server.password else "",
                folder=folder,
            )
        )
        if user is not None:
            for path in (folder, configuration):
                os.chown(path, pwd.getpwnam(user).pw_uid, -1)
        with (folder / "log").open("wb") as log:
            pooler = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", PROGRAM, str(configuration)],
                user=user,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        try:
            pooled = server.set(host=None, port=None, query={"host": str(folder), "port": "6432"})
            _wait_until_ready(pooled.render_as_string(hide_password=False), pooler, folder / "log")
            yield pooled.render_as_string(hide_password=False)
        finally:
            pooler.kill()
            pooler.wait()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _wait_until_ready(url: str, pooler: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            psycopg.connect(format_conninfo(url)).close()
        except psycopg.OperationalError as error:
            if pooler.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"pgbouncer accepts no connections:\n{log.read_text()}") from error
            time.sleep(0.02)
        else:
            return
