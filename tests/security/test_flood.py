"""One key, and clients without a key, flood the service with every kind of request while another key uses it."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from evalstop_lab.benchmarks.fair_shares import Victim, flooding, prepare_flood
from evalstop_lab.benchmarks.processes import Server
from evalstop_service.app import create_app
from evalstop_service.clock import utc_now
from evalstop_service.observability.metrics import ServiceMetrics
from evalstop_service.observability.tracing import Tracer
from evalstop_service.projects import api_keys
from evalstop_service.settings import Settings
from evalstop_service.store.database import Database
from evalstop_service.web.request_log import PROMPT_REFUSALS, RequestLog, SlowRefusals
from msgspec import structs
from starlette.types import Message, Receive, Scope, Send

from tests.fixtures.http_server import serve_app
from tests.fixtures.projects import create_project
from tests.service.concurrency import wait_until

REQUESTS_PER_KIND = 5

FLOOD_KINDS = ("posts", "late points", "pulls", "streams", "endpoint tests", "bodies without a key", "wrong keys")


@pytest.mark.real
def test_key_is_served_while_another_floods(embedded_database: Database) -> None:
    """Posts, vetoes and pages of the other key succeed, and no response to the flood is a 5xx."""
    create_project(embedded_database, "p", "shadow", 0.0, utc_now())
    key = api_keys.create_named_key(embedded_database, "p", "all", ["admin"], utc_now())[1]
    app = create_app(Settings(webhook_networks="127.0.0.0/8"), embedded_database, session_secret="s" * 32)
    with serve_app(app) as url:
        host, port = url.removeprefix("http://").split(":")
        with Server((host, int(port)), 0, key).connect() as admin:
            victim = Victim(admin, REQUESTS_PER_KIND)
            flood = prepare_flood(admin, url)
            senders = {"posts": 2, "late": 1, "pulls": 4, "streams": 6, "tests": 4, "bodies": 2, "wrong_keys": 2}
            with flooding(structs.replace(flood, **senders)) as flooded:
                durations = victim.measure(REQUESTS_PER_KIND)
                runs = [f"/api/v1/runs/{run_id}" for run_id in flood.run_ids]
                wait_until(lambda: all(admin.get(run).json()["last_step"] for run in runs))
    assert {kind: len(times) for kind, times in durations.items()} == dict.fromkeys(
        ("post", "veto", "page"), REQUESTS_PER_KIND
    )
    statuses = flooded[0].statuses
    assert set(statuses) == set(FLOOD_KINDS)
    answered = sum((Counter(counts) for counts in statuses.values()), Counter())
    assert not [status for status in answered if status.startswith("5")]
    assert statuses["posts"]["200"] > 0
    assert set(statuses["wrong keys"]) <= {"401", "429", "none"}


@pytest.mark.parametrize(("status", "delayed"), [(401, True), (429, True), (200, False), (403, False)])
def test_many_refusals_to_an_address_are_delayed(status: int, delayed: bool) -> None:
    """Beyond a burst, refusals of one address are delayed; those of another address and other responses are not."""
    answered = Counter[str]()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": status, "headers": []})

    async def send_request(middleware: RequestLog, address: str) -> None:
        async def send(message: Message) -> None:
            answered[address] += 1

        async def receive() -> Message:
            return {"type": "http.request"}

        scope = {"type": "http", "method": "GET", "path": "/", "headers": [], "client": (address, 1)}
        await middleware(scope, receive, send)

    async def run() -> None:
        middleware = RequestLog(app, ServiceMetrics(), Tracer(), False, SlowRefusals(pause_seconds=3600.0))
        burst = int(PROMPT_REFUSALS.burst)
        for _ in range(burst):
            await send_request(middleware, "many")
        late = asyncio.create_task(send_request(middleware, "many"))
        await asyncio.sleep(0)
        await send_request(middleware, "single")
        assert late.done() != delayed
        assert answered == {"many": burst + (not delayed), "single": 1}
        late.cancel()
        await asyncio.gather(late, return_exceptions=True)

    asyncio.run(run())
