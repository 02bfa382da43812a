"""While one key, and clients without one, flood the service with all they can, another key is heard."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from evalstop_lab.benchmarks.fair_shares import Victim, flooding, prepare_flood
from evalstop_lab.benchmarks.processes import Server
from evalstop_service.app import create_app
from evalstop_service.clock import utc_now
from evalstop_service.projects import api_keys
from evalstop_service.settings import Settings
from evalstop_service.store.database import Database
from evalstop_service.web.middleware.slow_refusals import MOST_AT_ONCE, SlowRefusals
from msgspec import structs
from starlette.types import Message, Receive, Scope, Send

from tests.fixtures.http_server import serve_app
from tests.fixtures.projects import create_project

TIMES = 5

KINDS = ("posts", "late points", "pulls", "streams", "endpoint tests", "bodies without a key", "wrong keys")


@pytest.mark.real
def test_a_key_is_heard_while_another_floods(embedded_database: Database) -> None:
    """Its posts are stored, its vetoes count and its page opens; the flood itself is answered without a fault."""
    create_project(embedded_database, "p", "shadow", 0.0, utc_now())
    key = api_keys.create_named_key(embedded_database, "p", "all", ["admin"], utc_now())[1]
    app = create_app(Settings(webhook_networks="127.0.0.0/8"), embedded_database, session_secret="s" * 32)
    with serve_app(app) as url:
        host, port = url.removeprefix("http://").split(":")
        with Server((host, int(port)), 0, key).connect() as admin:
            victim = Victim(admin, TIMES)
            flood = prepare_flood(admin, url)
            few = {"posts": 2, "late": 1, "pulls": 4, "streams": 6, "tests": 4, "bodies": 2, "wrong_keys": 2}
            with flooding(structs.replace(flood, **few)) as flooded:
                spent = victim.measure(TIMES)
    assert {kind: len(times) for kind, times in spent.items()} == dict.fromkeys(("post", "veto", "page"), TIMES)
    statuses = flooded[0].statuses
    assert set(statuses) == {
        "posts",
        "late points",
        "pulls",
        "streams",
        "endpoint tests",
        "bodies without a key",
        "wrong keys",
    }
    answered = sum((Counter(counts) for counts in statuses.values()), Counter())
    assert not [status for status in answered if status.startswith("5")]
    assert statuses["posts"]["200"] > 0
    assert set(statuses["wrong keys"]) <= {"401", "429", "none"}


@pytest.mark.parametrize(("status", "late"), [(401, True), (429, True), (200, False), (403, False)])
def test_refusals_of_a_crowd_are_late(status: int, late: bool) -> None:
    """Of an address that asks for more than a crowd at one time, what is refused waits, and nothing else does."""
    release, waiting = asyncio.Event(), list[str]()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await release.wait()
        await send({"type": "http.response.start", "status": status, "headers": []})

    async def ask(middleware: SlowRefusals, address: str) -> None:
        async def send(message: Message) -> None:
            waiting.append(address)

        async def receive() -> Message:
            return {"type": "http.request"}

        await middleware({"type": "http", "client": (address, 1)}, receive, send)

    async def run() -> list[str]:
        middleware = SlowRefusals(app, pause_seconds=3600.0)
        crowd = [asyncio.create_task(ask(middleware, "crowd")) for _ in range(MOST_AT_ONCE + 1)]
        single = asyncio.create_task(ask(middleware, "single"))
        await asyncio.sleep(0)
        release.set()
        await single
        answered = list(waiting)
        for task in crowd:
            task.cancel()
        await asyncio.gather(*crowd, return_exceptions=True)
        return answered

    answered = asyncio.run(run())
    assert "single" in answered
    assert ("crowd" not in answered) == late
