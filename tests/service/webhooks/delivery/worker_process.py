"""The process of a delivery worker, which tests kill."""

from __future__ import annotations

import asyncio
import random
from datetime import UTC, datetime

from evalstop_service.security.address_policy import parse_address_policy
from evalstop_service.store.database import Database
from evalstop_service.webhooks.delivery.send import Sender
from evalstop_service.webhooks.delivery.worker import DeliveryWorker, WorkerLimits


def run_worker(url: str, lease_seconds: float) -> None:
    """Deliver until the process is killed."""
    asyncio.run(_deliver(url, lease_seconds))


async def _deliver(url: str, lease_seconds: float) -> None:
    async with Sender(
        timeout_seconds=lease_seconds * 0.9, address_policy=parse_address_policy("127.0.0.0/8")
    ) as sender:
        worker = DeliveryWorker(
            Database(url),
            sender,
            clock=lambda: datetime.now(UTC),
            chance=random.Random(1),
            limits=WorkerLimits(poll_seconds=0.02, lease_seconds=lease_seconds),
        )
        await worker.run(asyncio.Event())
