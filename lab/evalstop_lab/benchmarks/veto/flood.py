"""Floods one route of a service, in a process of its own: `python -m evalstop_lab.benchmarks.veto.flood`.

Reads one JSON object (`Flood`) from its standard input, floods until that is closed, and prints how often it was
answered with which status. It never waits after a refusal.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
from collections import Counter

import msgspec

COUNT, BATCH = "@count@", "@batch@"
"""Replaced in each request by its number, and by 2,000 new evals."""

BATCH_SIZE = 2_000
STREAM_SECONDS = 5.0
"""How long an answer without an end is read."""


class Flood(msgspec.Struct):
    """A request, its senders' headers, over how many connections in all, and where the counted numbers begin."""

    host: str
    port: int
    method: str
    path: str
    media_type: str
    body: str
    senders: list[dict[str, str]]
    connections: int = 24
    first: int = 10_000


def _fill(flood: Flood, number: int) -> tuple[str, bytes]:
    body = flood.body
    if BATCH in body:
        start = number * BATCH_SIZE
        points = [{"metric": "eval", "step": start + index, "value": 0.5} for index in range(BATCH_SIZE)]
        body = body.replace(f'"{BATCH}"', json.dumps(points))
    body = body.replace(f'"step": "{COUNT}"', f'"step": {number}').replace(COUNT, str(number))
    return flood.path.replace(COUNT, str(number)), body.encode()


async def _read_answer(reader: asyncio.StreamReader) -> str:
    """Read an answer; returns its status."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    status = head.split(" ", 2)[1]
    if "content-length: " in head:
        await reader.readexactly(int(head.split("content-length: ")[1].split("\r\n")[0]))
    elif "transfer-encoding: chunked" in head:
        async with asyncio.timeout(STREAM_SECONDS):
            while size := int(await reader.readline(), 16):
                await reader.readexactly(size + 2)
            await reader.readline()
    return status


async def _repeat(flood: Flood, sender: dict[str, str], numbers: itertools.count[int], counts: Counter[str]) -> None:
    writer = None
    while True:
        path, body = _fill(flood, next(numbers))
        headers = {"Host": f"{flood.host}:{flood.port}", "Content-Length": str(len(body)), **sender}
        if flood.media_type:
            headers["Content-Type"] = flood.media_type
        head = f"{flood.method} {path} HTTP/1.1\r\n" + "".join(f"{name}: {text}\r\n" for name, text in headers.items())
        try:
            if writer is None:
                reader, writer = await asyncio.open_connection(flood.host, flood.port)
            writer.write(head.encode() + b"\r\n" + body)
            await writer.drain()
            counts[await _read_answer(reader)] += 1
        except (OSError, EOFError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError):
            counts["none"] += 1
            if writer is not None:
                writer.close()
            writer = None
            await asyncio.sleep(0.01)


async def _flood(flood: Flood) -> Counter[str]:
    counts, numbers = Counter[str](), itertools.count(flood.first)
    senders = itertools.islice(itertools.cycle(flood.senders), flood.connections)
    tasks = [asyncio.create_task(_repeat(flood, sender, numbers, counts)) for sender in senders]
    sys.stdout.write("flooding\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return counts


def main() -> int:
    """Flood until the standard input is closed."""
    os.nice(10)
    flood = msgspec.json.decode(sys.stdin.readline(), type=Flood)
    sys.stdout.write(json.dumps(asyncio.run(_flood(flood))) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
