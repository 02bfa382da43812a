"""Floods: what a veto waits beside one, and refusals, which are answered more slowly the more there are."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections import Counter

import pytest
from evalstop_lab.benchmarks.veto import floods
from evalstop_lab.benchmarks.veto.routes import list_floods
from evalstop_service.observability.metrics import ServiceMetrics
from evalstop_service.web.request_log import PROMPT_REFUSALS, RequestLog, SlowRefusals
from starlette.types import Message, Receive, Scope, Send


def test_every_route_is_flooded() -> None:
    """Each route of the API, of MLflow and of the pages is in the table, but those that end what floods them."""
    floods_by_part = Counter(flood.path.split("/")[1] for flood in list_floods())
    assert floods_by_part["api"] > 50
    assert floods_by_part["mlflow"] > 15
    assert sum(floods_by_part.values()) > 130


@pytest.mark.nightly
@pytest.mark.real
@pytest.mark.skipif(shutil.which("wrk") is None, reason="needs wrk")
def test_veto_beside_a_flood_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """Two keys of one project open runs without a pause; the other project's vetoes and pauses are answered."""
    floods.main(["--json", "--times", "2", "--only", "POST /api/v1/runs$"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["keys"] for row in rows] == [1, 2]
    for row in rows:
        assert row["statuses"]["201"] > 0
        assert not [status for status in row["statuses"] if status.startswith("5")]


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
        middleware = RequestLog(app, ServiceMetrics(), False, SlowRefusals(pause_seconds=3600.0))
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
