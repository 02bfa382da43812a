"""Load: a number of connections that ask one thing after another, each as fast as it is answered."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import aiohttp


@dataclass(frozen=True)
class Ask:
    """One request; `count` is what its answer acknowledges."""

    method: str
    url: str
    body: dict[str, Any] | None = None
    count: int = 1


Asks = Callable[[int], Iterator[Ask]]
"""The endless requests of connection number n."""


async def load(asks: Asks, key: str | None, connections: int, seconds: float) -> float:
    """How much was acknowledged a second; raises when an answer was not 2xx."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    acknowledged = 0
    async with aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(limit=connections)) as session:
        begun = time.perf_counter()
        deadline = begun + seconds

        async def connection(number: int) -> None:
            nonlocal acknowledged
            for ask in asks(number):
                if time.perf_counter() >= deadline:
                    return
                async with session.request(ask.method, ask.url, json=ask.body) as response:
                    response.raise_for_status()
                    await response.read()
                acknowledged += ask.count

        await asyncio.gather(*map(connection, range(connections)))
        return acknowledged / (time.perf_counter() - begun)


def batches(url: str, run_ids: list[str], size: int, first_step: int) -> Asks:
    """Batches of `size` fresh observations, one run a connection: 1 in 20 an eval, the rest proxy, KL and loss."""

    def asks(number: int) -> Iterator[Ask]:
        metrics = itertools.cycle(["eval", *["proxy", "kl", "loss"] * 7][:20])
        points = ({"metric": next(metrics), "step": step, "value": step % 7} for step in itertools.count(first_step))
        while True:
            body = {"observations": list(itertools.islice(points, size))}
            yield Ask("POST", f"{url}/api/v1/runs/{run_ids[number]}/observations", body, size)

    return asks
