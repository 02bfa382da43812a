"""A key that floods a service, in a process of its own: `python -m evalstop_lab.benchmarks.flood`.

Reads one JSON object (`Flood`) from its standard input, floods until that is closed, and prints how often it was
answered with which status. It never waits after a refusal, and gives way to others on the processor.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

import aiohttp
import msgspec

MIB = b"x" * 2**20

LATE_STEPS = 2_000
"""How long the run is whose past the flood changes."""


class Flood(msgspec.Struct):
    """What is flooded: the API's URL, the key, runs of it that posts go to, and its endpoints."""

    url: str
    key: str
    run_ids: list[str]
    late_run_id: str
    pull_endpoint_id: str
    endpoint_id: str
    posts: int = 16
    late: int = 4
    pulls: int = 60
    streams: int = 6
    tests: int = 4
    bodies: int = 8
    wrong_keys: int = 4


class Flooded(msgspec.Struct):
    """How many requests of each kind were answered with which status; "none": without an answer."""

    statuses: dict[str, dict[str, int]]


class _Flooder:
    def __init__(self, flood: Flood, session: aiohttp.ClientSession) -> None:
        self.flood, self.session = flood, session
        self.statuses: dict[str, Counter[str]] = {}
        self.headers = {"Authorization": f"Bearer {flood.key}"}
        self._steps = itertools.count(1)

    async def repeat(self, kind: str, send: Callable[[], Awaitable[int]]) -> None:
        """Send one request after the other."""
        counts = self.statuses.setdefault(kind, Counter())
        while True:
            try:
                counts[str(await send())] += 1
            except (aiohttp.ClientError, OSError, TimeoutError):
                counts["none"] += 1
                await asyncio.sleep(0.01)

    async def request(
        self, path: str, json: object = None, data: object = None, headers: Mapping[str, str] | None = None
    ) -> int:
        """The status of a POST, with the flooding key unless `headers` say otherwise."""
        url, headers = f"{self.flood.url}{path}", self.headers if headers is None else headers
        async with self.session.post(url, json=json, data=data, headers=headers) as response:
            await response.read()
            return response.status

    async def post(self) -> int:
        step = next(self._steps)
        points = [{"metric": name, "step": step, "value": step % 7} for name in ("eval", "proxy", "kl")]
        run_id = self.flood.run_ids[step % len(self.flood.run_ids)]
        return await self.request(f"/runs/{run_id}/observations", json={"observations": points})

    async def post_late(self) -> int:
        step = next(self._steps) % LATE_STEPS
        points = [{"metric": f"m{next(self._steps)}", "step": step, "value": 1.0}]
        points += [{"metric": "eval", "step": 2 * step + 1, "value": 0.5}]
        return await self.request(f"/runs/{self.flood.late_run_id}/observations", json={"observations": points})

    async def pull(self) -> int:
        return await self.request(f"/pull/endpoints/{self.flood.pull_endpoint_id}/claim", json={"wait_seconds": 5.0})

    async def stream(self) -> int:
        async def lines() -> AsyncIterator[bytes]:
            for _ in range(100):
                yield b"\n"
                await asyncio.sleep(0.1)

        headers = self.headers | {"Content-Type": "application/x-ndjson"}
        return await self.request("/observations", headers=headers, data=lines())

    async def test_endpoint(self) -> int:
        return await self.request(f"/endpoints/{self.flood.endpoint_id}/test")

    async def send_body(self) -> int:
        async def body() -> AsyncIterator[bytes]:
            for _ in range(8):
                yield MIB

        return await self.request("/runs", headers={"Content-Type": "application/json"}, data=body())

    async def try_key(self) -> int:
        return await self.request("/runs", headers={"Authorization": "Bearer esk_nosuch"}, json={})


async def _flood(flood: Flood) -> Flooded:
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        flooder = _Flooder(flood, session)
        kinds = {
            "posts": (flood.posts, flooder.post),
            "late points": (flood.late, flooder.post_late),
            "pulls": (flood.pulls, flooder.pull),
            "streams": (flood.streams, flooder.stream),
            "endpoint tests": (flood.tests, flooder.test_endpoint),
            "bodies without a key": (flood.bodies, flooder.send_body),
            "wrong keys": (flood.wrong_keys, flooder.try_key),
        }
        tasks = [
            asyncio.create_task(flooder.repeat(kind, send))
            for kind, (count, send) in kinds.items()
            for _ in range(count)
        ]
        sys.stdout.write("flooding\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.read)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return Flooded({kind: dict(counts) for kind, counts in flooder.statuses.items()})


def main() -> int:
    """Flood until the standard input is closed."""
    os.nice(10)
    flood = msgspec.json.decode(sys.stdin.readline(), type=Flood)
    sys.stdout.write(msgspec.json.encode(asyncio.run(_flood(flood))).decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
