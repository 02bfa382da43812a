"""The streams that open pages follow."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

import anyio
import httpx
import pytest
from evalstop_service.decisions import commands
from evalstop_service.rules.decision_lifecycle import DecisionState, Reported
from evalstop_service.rules.statuses import DecisionOutcome
from evalstop_service.store import keys
from evalstop_service.store.database import Database
from evalstop_service.web import dashboard
from evalstop_service.web.dashboard.server_sent_events import Streams
from evalstop_service.web.fair_shares import FairShares
from fastapi import Response

from tests.service.web.dashboard.recorded_runs import Tenant, add_tenant, open_run, recorded, report
from tests.service.web.dashboard.serving import EMBEDDED, SECRET

EVALS = recorded("np-0044")

DEADLINE_SECONDS = 30.0

SERVER = """
import sys, uvicorn
from evalstop_service.app import create_app
from evalstop_service.settings import Settings
from evalstop_service.store.database import Database
app = create_app(Settings(), Database(sys.argv[1]), session_secret=sys.argv[2])
uvicorn.run(app, host="127.0.0.1", port=0, ws="none", log_level="info")
"""


@contextmanager
def events(client: httpx.Client, path: str) -> Iterator[Iterator[str]]:
    """The names of a stream's events as they come."""
    with client.stream("GET", path) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield (line.removeprefix("event: ") for line in answer.iter_lines() if line.startswith("event: "))


def revision(client: httpx.Client, path: str) -> str:
    return client.get(path).text.split('data-revision="')[1].split('"')[0]


def test_news_of_a_run(visitor: httpx.Client, database: Database, tenant: Tenant, now: datetime) -> None:
    """Observations, a verdict, a veto, an outcome, an end: each is told, and what was there before is not."""
    run = open_run(database, tenant, now, "ppo", mode="enforce")
    receipt = report(database, tenant, run.id, EVALS[:28], now)
    path = f"/runs/{run.id}"
    with events(visitor, f"{path}/events?seen={revision(visitor, path)}") as names:
        receipt = report(database, tenant, run.id, EVALS[28:29], now)
        assert next(names) == "changed"
        assert receipt.decision is not None
        decision = receipt.decision.id
        project = tenant.project.id
        changes: list[Callable[[], object]] = [
            lambda: commands.label_decision(
                database, project, decision, commands.Label(DecisionOutcome.RIGHT, None, "", "ada", now)
            ),
            lambda: commands.record_report(
                database, project, decision, Reported(now, DecisionState.FAILED, "receiver", "no", {})
            ),
            lambda: commands.finish_run(database, project, run.id, "failed", now),
        ]
        for change in changes:
            settled = revision(visitor, path)
            change()
            assert revision(visitor, path) != settled
            assert next(names) == "changed"


def test_news_of_the_list(visitor: httpx.Client, database: Database, tenant: Tenant, now: datetime) -> None:
    """A new run is news for a list that would show it, and for no other."""
    with (
        events(visitor, f"/runs/events?seen={revision(visitor, '/runs')}") as of_all,
        events(visitor, f"/runs/events?name=other&seen={revision(visitor, '/runs?name=other')}") as of_others,
    ):
        open_run(database, tenant, now, "one")
        assert next(of_all) == "changed"
        open_run(database, tenant, now, "other")
        assert next(of_others) == "changed"
        assert revision(visitor, "/runs?name=other") != revision(visitor, "/runs")


@EMBEDDED
def test_what_was_missed_is_told_at_once(
    visitor: httpx.Client, database: Database, tenant: Tenant, now: datetime
) -> None:
    """A page that comes back with the revision that it knows hears at once that there is another."""
    known = revision(visitor, "/runs")
    open_run(database, tenant, now, "meanwhile")
    with events(visitor, f"/runs/events?seen={known}") as names:
        assert next(names) == "changed"


@EMBEDDED
def test_a_revoked_key_ends_the_stream(
    visitor: httpx.Client, database: Database, tenant: Tenant, now: datetime
) -> None:
    """An open page is told that it is over when its key is revoked."""
    with events(visitor, f"/runs/events?seen={revision(visitor, '/runs')}") as names:
        with database.transaction() as tx:
            keys.revoke_key(tx, tenant.project.id, tenant.key.id, now)
        assert list(names) == ["gone"]


def test_open_streams_are_limited_and_given_back() -> None:
    """Past the limit a stream is refused; when a client goes away its place is free again."""
    streams = Streams(FairShares(), most=1, poll_seconds=0.001)

    async def follow_and_leave() -> None:
        started = anyio.Event()

        async def receive() -> dict[str, str]:
            await started.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, object]) -> None:
            if message.get("body"):
                assert streams.open_count == 1
                assert refused(streams.open_stream("dana", "", lambda: "new"))
                started.set()

        scope = {"type": "http", "method": "GET"}
        await streams.open_stream("dana", "", lambda: "new")(scope, receive, send)  # type: ignore[arg-type]
        assert streams.open_count == 0
        assert not refused(streams.open_stream("dana", "", lambda: "new"))

    def refused(answer: Response) -> bool:
        return answer.status_code == 503

    anyio.run(follow_and_leave)


@pytest.mark.real
@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT])
def test_a_server_with_open_streams_shuts_down(
    embedded_database: Database, now: datetime, tmp_path: Path, ending: signal.Signals
) -> None:
    """A signal ends the streams, and so the server, without being forced."""
    tenant = add_tenant(embedded_database, now)
    log = tmp_path / "log"
    with log.open("wb") as output:
        server = subprocess.Popen(
            [sys.executable, "-c", SERVER, embedded_database.url.render_as_string(), SECRET], stderr=output
        )
    try:
        with httpx.Client(base_url=address_in(log, server), timeout=DEADLINE_SECONDS) as client:
            client.get("/login", params={"token": dashboard.sign_in_token(SECRET, tenant.key.id, lambda: now)})
            with events(client, "/runs/events?seen=") as names:
                assert next(names) == "changed"
                server.send_signal(ending)
                with suppress(httpx.RemoteProtocolError):  # the last chunk is missing: the stream was cut, not ended
                    assert list(names) == []
        assert server.wait(DEADLINE_SECONDS) in (0, -ending)
        assert "Traceback" not in log.read_text().replace("KeyboardInterrupt", "")
    finally:
        server.kill()
        server.wait()


def address_in(log: Path, server: subprocess.Popen[bytes]) -> str:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while "running on " not in log.read_text():
        assert server.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.02)
    return log.read_text().split("running on ")[1].split()[0]
