"""Event streams: an open page is told when what it shows has changed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import anyio
import httpx
import pytest
from evalstop_service.decisions import commands
from evalstop_service.domain.decision_events import Reported
from evalstop_service.domain.decision_lifecycle import DecisionState
from evalstop_service.domain.statuses import DecisionOutcome
from evalstop_service.store import keys
from evalstop_service.store.database import Database, Work
from evalstop_service.web import pages
from evalstop_service.web.limits import Limits, Places
from evalstop_service.web.pages.visitor import Streams
from fastapi import Response

from tests.fixtures.forked_commands import FORKSERVER
from tests.service.web.pages.recorded_runs import Tenant, add_tenant, load_recorded_evals
from tests.service.web.pages.server_process import run_server
from tests.service.web.pages.serving import SESSION_SECRET, SQLITE_ONLY

EVALS = load_recorded_evals("np-0044")
DANA = Work("user dana", "project")

TIMEOUT_SECONDS = 60.0


@contextmanager
def follow_events(client: httpx.Client, path: str) -> Iterator[Iterator[str]]:
    """The names of a stream's events as they arrive."""
    with client.stream("GET", path) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield (line.removeprefix("event: ") for line in answer.iter_lines() if line.startswith("event: "))


def read_revision(client: httpx.Client, path: str) -> str:
    return client.get(path).text.split('data-revision="')[1].split('"')[0]


def test_run_stream_reports_each_change(
    visitor: httpx.Client, database: Database, tenant: Tenant, now: datetime
) -> None:
    """A verdict, an outcome, a report and an end each send `changed`, and earlier changes do not."""
    run = tenant.open_run("ppo", mode="enforce")
    receipt = tenant.post_evals(run, EVALS[:28])
    path = f"/runs/{run.id}"
    with follow_events(visitor, f"{path}/events?seen={read_revision(visitor, path)}") as names:
        receipt = tenant.post_evals(run, EVALS[28:29])
        assert next(names) == "changed"
        assert receipt.decision is not None
        decision = receipt.decision.id
        project = tenant.id
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
            before = read_revision(visitor, path)
            change()
            assert read_revision(visitor, path) != before
            assert next(names) == "changed"


def test_list_stream_reports_only_matching_runs(visitor: httpx.Client, tenant: Tenant) -> None:
    """A new run sends `changed` to a list whose filter it matches, and to no other."""
    with (
        follow_events(visitor, f"/runs/events?seen={read_revision(visitor, '/runs')}") as all_runs,
        follow_events(
            visitor, f"/runs/events?name=other&seen={read_revision(visitor, '/runs?name=other')}"
        ) as other_runs,
    ):
        tenant.open_run("one")
        assert next(all_runs) == "changed"
        tenant.open_run("other")
        assert next(other_runs) == "changed"
        assert read_revision(visitor, "/runs?name=other") != read_revision(visitor, "/runs")


@SQLITE_ONLY
def test_reconnecting_with_an_old_revision_reports_at_once(visitor: httpx.Client, tenant: Tenant) -> None:
    """A page that reconnects with an older revision gets `changed` at once."""
    known = read_revision(visitor, "/runs")
    tenant.open_run("meanwhile")
    with follow_events(visitor, f"/runs/events?seen={known}") as names:
        assert next(names) == "changed"


@SQLITE_ONLY
def test_revoked_key_ends_the_stream(visitor: httpx.Client, database: Database, tenant: Tenant, now: datetime) -> None:
    """A page whose key is revoked gets `gone`, and the stream ends."""
    with follow_events(visitor, f"/runs/events?seen={read_revision(visitor, '/runs')}") as names:
        with database.transaction() as tx:
            keys.revoke_key(tx, tenant.id, tenant.key.id, now)
        assert list(names) == ["gone"]


def test_open_streams_are_limited() -> None:
    """Beyond the limit a stream is refused with 429; a client that disconnects frees its place."""
    limits = Limits()
    limits.event_streams = Places("event streams", 1, 1, 1)
    streams = Streams(limits, poll_seconds=0.001)

    async def follow_and_leave() -> None:
        started = anyio.Event()

        async def receive() -> dict[str, str]:
            await started.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, object]) -> None:
            if message.get("body"):
                assert streams.open_count == 1
                assert is_refused(streams.open_stream(DANA, "", lambda: "new"))
                started.set()

        scope = {"type": "http", "method": "GET"}
        await streams.open_stream(DANA, "", lambda: "new")(scope, receive, send)  # type: ignore[arg-type]
        assert streams.open_count == 0
        assert not is_refused(streams.open_stream(DANA, "", lambda: "new"))

    def is_refused(answer: Response) -> bool:
        return answer.status_code == 429

    anyio.run(follow_and_leave)


def test_streams_that_begin_together_end_without_a_place() -> None:
    """Of streams of one session that begin at the same moment, those beyond its share end without an event."""
    streams = Streams(Limits(), poll_seconds=0.001)
    answers = [streams.open_stream(DANA, "", lambda: "new") for _ in range(30)]
    sent: list[object] = []

    async def follow_all() -> None:
        all_sent = anyio.Event()

        async def receive() -> dict[str, str]:
            await all_sent.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, object]) -> None:
            if message.get("body"):
                sent.append(message["body"])
            if len(sent) == 20:
                all_sent.set()

        async with anyio.create_task_group() as following:
            for answer in answers:
                following.start_soon(answer, {"type": "http", "method": "GET"}, receive, send)  # type: ignore[arg-type]

    anyio.run(follow_all)
    assert len(sent) == 20
    assert streams.open_count == 0


@pytest.mark.real
@pytest.mark.parametrize("shutdown_signal", [signal.SIGTERM, signal.SIGINT])
def test_server_with_open_streams_shuts_down(
    embedded_database: Database, now: datetime, tmp_path: Path, shutdown_signal: signal.Signals
) -> None:
    """A signal ends the streams and then the server, which need not be killed."""
    tenant = add_tenant(embedded_database, now)
    log = tmp_path / "log"
    log.touch()
    server = FORKSERVER.Process(target=run_server, args=(embedded_database.url.render_as_string(), SESSION_SECRET, log))
    server.start()
    assert server.pid is not None
    try:
        with httpx.Client(base_url=wait_for_address(log, server), timeout=TIMEOUT_SECONDS) as client:
            client.get("/login", params={"token": pages.sign_in_token(SESSION_SECRET, tenant.key.id, lambda: now)})
            with follow_events(client, "/runs/events?seen=") as names:
                assert next(names) == "changed"
                os.kill(server.pid, shutdown_signal)
                with suppress(httpx.RemoteProtocolError):  # the stream is cut off, so its last chunk is missing
                    assert list(names) == []
        server.join(TIMEOUT_SECONDS)
        assert server.exitcode in (0, -shutdown_signal)
        assert "Traceback" not in log.read_text()
    finally:
        server.kill()
        server.join()


def wait_for_address(log: Path, server: ForkServerProcess) -> str:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while "running on " not in log.read_text():
        assert server.is_alive(), log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.02)
    return log.read_text().split("running on ")[1].split()[0]
