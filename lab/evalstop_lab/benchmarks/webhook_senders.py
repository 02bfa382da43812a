"""Who sends webhooks in `make bench-webhooks`: the real worker on a database, and a bare HTTP client."""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import aiohttp
import sqlalchemy as sa
from evalstop_service.clock import utc_now
from evalstop_service.ingest import open_run
from evalstop_service.observability.metrics import ServiceMetrics
from evalstop_service.projects import project_settings
from evalstop_service.projects.project_settings import NewProject
from evalstop_service.rules.decision_lifecycle import Mode
from evalstop_service.security import address_policy
from evalstop_service.store import endpoints
from evalstop_service.store.database import Database
from evalstop_service.store.endpoints import Endpoint
from evalstop_service.store.ids import new_id
from evalstop_service.store.queue import outbox
from evalstop_service.store.tables import deliveries, events, runs
from evalstop_service.webhooks import signature
from evalstop_service.webhooks.delivery.send import Sender
from evalstop_service.webhooks.delivery.worker import DeliveryWorker, WorkerLimits

AT_A_TIME = 16
DEADLINE_SECONDS = 120.0
LOOPBACK = address_policy.parse_address_policy("127.0.0.0/8")

BODY = json.dumps(
    {
        "type": "run.stop_requested",
        "timestamp": "2026-01-01T00:00:00Z",
        "data": {
            "project": {"id": str(UUID(int=1)), "name": "default"},
            "run": {"id": str(UUID(int=2)), "name": "ppo-7b-seed3", "attempt": 1, "labels": {"receiver": "job-17"}},
            "decision": {"id": str(UUID(int=3)), "state": "requested", "step": 1200, "due_at": "2026-01-01T00:00:00Z"},
            "verdict": {
                "verdict": "stop",
                "step": 1200,
                "turn_step": 900,
                "reason": "3 evals in a row fell",
                "evidence": [
                    {
                        "detector": "k_decline",
                        "role": "eval",
                        "kind": "count",
                        "value": 3.0,
                        "suspect_at": 1.0,
                        "stop_at": 3.0,
                        "turn_step": 900,
                        "note": "",
                    }
                ],
            },
            "best_checkpoint": {
                "step": 900,
                "uri": "s3://runs/ppo-7b-seed3/900",
                "score": 0.71,
                "chosen_by": "smoothed",
            },
        },
    },
    separators=(",", ":"),
)
"""A stop event; every contender sends these bytes."""


@dataclass(frozen=True)
class Outbox:
    """A migrated database with a project, a run and an endpoint."""

    database: Database
    project_id: UUID
    run_id: UUID
    endpoint: Endpoint


def create_outbox(database: Database, url: str) -> Outbox:
    """Make a project and a run, and subscribe the URL to all events."""
    now = utc_now()
    project = project_settings.create_project(
        database,
        NewProject(name=new_id().hex, default_mode=Mode.ENFORCE, default_policy="paper", held_out_share=0.0),
        "benchmark",
        now,
    )
    run, _ = open_run.open_run(database, project.id, open_run.OpenRequest("ppo"), now)
    with database.transaction() as tx:
        endpoint = endpoints.add_endpoint(tx, project.id, url=url, event_types=("*",), now=now)
    return Outbox(database, project.id, run.id, endpoint)


def fill_outbox(box: Outbox, count: int) -> None:
    """Add waiting deliveries, each of a run of its own, as `outbox.add_event` does one by one."""
    now = utc_now()
    with box.database.reading() as tx:
        run = dict(tx.execute(sa.select(runs).where(runs.c.id == box.run_id)).mappings().one())
    copies = [run | {"id": key, "name": str(key)} for key in (new_id() for _ in range(count))]
    new_events: list[dict[str, Any]] = []
    for copy in copies:
        event = {"run_id": copy["id"], "id": new_id(), "project_id": box.project_id, "type": "run.stop_requested"}
        new_events.append(event | {"body": BODY, "created_at": now})
    rows = [
        {
            "run_id": event["run_id"],
            "id": new_id(),
            "event_id": event["id"],
            "endpoint_id": box.endpoint.id,
            "state": "waiting",
            "attempts": 0,
            "due_at": now,
            "urgent": True,
            "created_at": now,
        }
        for event in new_events
    ]
    with box.database.transaction() as tx:
        tx.execute(sa.insert(runs), copies)
        tx.execute(sa.insert(events), new_events)
        tx.execute(sa.insert(deliveries), rows)


async def deliver_with_worker(box: Outbox, count: int) -> float:
    """Deliveries a second, from the start of a worker to the last one settled."""
    async with Sender(address_policy=LOOPBACK) as sender:
        service_metrics = ServiceMetrics()
        stop = asyncio.Event()
        started = time.perf_counter()
        running = asyncio.create_task(_create_worker(box.database, sender, service_metrics).run(stop))
        try:
            while (settled := _count_delivered(service_metrics)) < count:
                if running.done():
                    running.result()
                if time.perf_counter() - started > DEADLINE_SECONDS:
                    raise TimeoutError(f"{settled:g} of {count} deliveries were settled in {DEADLINE_SECONDS:g} s")
                await asyncio.sleep(0.005)
            seconds = time.perf_counter() - started
        finally:
            stop.set()
            await running
    return count / seconds


async def post_with_bare_client(box: Outbox, count: int) -> float:
    """POSTs a second of what the worker would send, signed beforehand, by as many loops as attempts under way."""
    body = BODY.encode()
    at = int(datetime.now(UTC).timestamp())
    kind = {"Content-Type": "application/json"}
    signed = [signature.sign_headers((box.endpoint.secret,), str(new_id()), at, body) | kind for _ in range(count)]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def post() -> None:
            while signed:
                async with session.post(box.endpoint.url, data=body, headers=signed.pop()) as response:
                    response.raise_for_status()
                    await response.read()

        started = time.perf_counter()
        await asyncio.gather(*(post() for _ in range(AT_A_TIME)))
        return count / (time.perf_counter() - started)


async def measure_latencies(box: Outbox, count: int, arrived: asyncio.Queue[float]) -> list[float]:
    """Milliseconds from the end of a commit to the arrival of its webhook, one event after another."""
    latencies = []

    def add_event() -> float:
        with box.database.transaction() as tx:
            data = {"number": 0}
            terms: dict[str, Any] = {"type": "run.suspected", "data": data, "now": utc_now()}
            outbox.add_event(tx, project_id=box.project_id, run_id=box.run_id, **terms)
        return time.perf_counter()

    async with Sender(address_policy=LOOPBACK) as sender:
        stop = asyncio.Event()
        running = asyncio.create_task(_create_worker(box.database, sender).run(stop))
        await asyncio.sleep(1.0)  # until the worker listens
        for _ in range(count):
            committed = await asyncio.to_thread(add_event)
            latencies.append((await asyncio.wait_for(arrived.get(), DEADLINE_SECONDS) - committed) * 1000)
            await asyncio.sleep(random.uniform(0.02, 0.06))
        stop.set()
        await running
    return latencies


def _create_worker(database: Database, sender: Sender, service_metrics: ServiceMetrics | None = None) -> DeliveryWorker:
    limits = WorkerLimits(concurrency=AT_A_TIME, per_endpoint=AT_A_TIME)
    return DeliveryWorker(
        database, sender, clock=utc_now, chance=random.Random(1), limits=limits, service_metrics=service_metrics
    )


def _count_delivered(service_metrics: ServiceMetrics) -> float:
    samples = (sample for metric in service_metrics.deliveries.collect() for sample in metric.samples)
    return sum(sample.value for sample in samples if sample.labels == {"result": "delivered"})
