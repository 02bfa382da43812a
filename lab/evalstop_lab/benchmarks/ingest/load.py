"""Generates the load of a benchmark: each client posts its next batch as soon as the last one is answered.

General load generators send a fixed body; here each request has new steps, which are formatted during the measurement,
and acknowledged observations are counted to compare them with the stored ones.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import math
import random
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import uvloop

from evalstop_lab.benchmarks.processes import JobFailed

RESPONSE_TIMEOUT_SECONDS = 60.0
METRICS = ("eval", *["proxy", "kl", "loss"] * 7)[:20]
"""The metrics of consecutive observations; 1 in 20 is an eval."""

PERIOD = 40_000
"""The number of observations after which values repeat; steps do not."""

_RANDOM = random.Random(20_260_101)
_NOISE = tuple(_RANDOM.gauss(0.0, 0.02) for _ in range(PERIOD))
_OPENING, _CLOSING = b'{"observations":[', b"]}"
_LENGTH, _RETRY_AFTER = re.compile(rb"\r\ncontent-length: *(\d+)"), re.compile(rb"\r\nretry-after: *(\d+)")


@dataclass(frozen=True, kw_only=True)
class Job:
    """One load. Client i posts to one of the addresses, to the runs i, i + clients, ... in turns.

    `first_step`: the step of each run's first observation.
    `requests`: the number per client; None: limited only by time.
    """

    addresses: tuple[tuple[str, int], ...]
    runs: tuple[str, ...]
    clients: int
    batch: int
    seconds: float
    key: str | None = None
    first_step: int = 0
    requests: int | None = None


@dataclass(frozen=True, kw_only=True)
class Load:
    """The result of a job. `observations` are those acknowledged by a response.

    `retried`: requests that were answered 503 or 429 and sent again.
    `generator_cpu`: CPU time of the generator, as a share of one core.
    """

    observations: int
    requests: int
    retried: int
    seconds: float
    p50_ms: float
    p99_ms: float
    generator_cpu: float

    @property
    def per_second(self) -> float:
        return self.observations / self.seconds


def run_load(job: Job) -> Load:
    """Run the job in this process, which should do nothing else; raises JobFailed for a wrong answer."""
    return uvloop.run(generate_load(job))


async def generate_load(job: Job) -> Load:
    """Run the job; returns after every request has been answered."""
    prepare_templates(job.batch)  # fills its cache before the measurement
    clients = [_Client(job, number) for number in range(job.clients)]
    await asyncio.gather(*(client.connect() for client in clients))
    gc.collect()
    gc.disable()  # a pause of the generator would be attributed to the server
    started, cpu = time.perf_counter(), time.process_time()
    try:
        async with asyncio.timeout(job.seconds + RESPONSE_TIMEOUT_SECONDS), asyncio.TaskGroup() as group:
            for client in clients:
                group.create_task(client.post_until(started + job.seconds))
    except ExceptionGroup as errors:
        first = errors.exceptions[0]
        raise (first if isinstance(first, JobFailed) else JobFailed(repr(first))) from errors
    except TimeoutError as error:
        raise JobFailed("It did not answer in time.") from error
    finally:
        gc.enable()
        for client in clients:
            client.writer.close()
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    latencies = sorted(itertools.chain.from_iterable(client.latencies for client in clients))
    return Load(
        observations=len(latencies) * job.batch,
        requests=len(latencies),
        retried=sum(client.retried for client in clients),
        seconds=seconds,
        p50_ms=find_percentile(latencies, 0.5) * 1000,
        p99_ms=find_percentile(latencies, 0.99) * 1000,
        generator_cpu=cpu / seconds,
    )


class _Client:
    """Posts its requests in order, one at a time, on one connection."""

    def __init__(self, job: Job, number: int) -> None:
        self._address = job.addresses[number % len(job.addresses)]
        host, runs = "{}:{}".format(*self._address), job.runs[number :: job.clients]
        self._requests = _take_turns([generate_requests(run, job.batch, host, job.key, job.first_step) for run in runs])
        self._remaining = math.inf if job.requests is None else job.requests
        self.latencies: list[float] = []
        self.retried = 0

    async def connect(self) -> None:
        self._reader, self.writer = await asyncio.open_connection(*self._address)

    async def post_until(self, deadline: float) -> None:
        """Post until the deadline, or as often as the job says; a refused request is sent again."""
        while self._remaining and time.perf_counter() < deadline:
            self._remaining -= 1
            request, sent_at = next(self._requests), time.perf_counter()
            while (wait_seconds := await self._post(request)) is not None:
                self.retried += 1
                await asyncio.sleep(wait_seconds)
            self.latencies.append(time.perf_counter() - sent_at)

    async def _post(self, request: bytes) -> float | None:
        """Post once; returns after how many seconds to send the request again, None if it was accepted."""
        if self._reader.at_eof():  # servers may close idle connections
            await self.connect()
        self.writer.write(request)
        try:
            head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
            length = _LENGTH.search(head)
            if not head.startswith(b"http/1.1 ") or length is None:
                raise JobFailed(f"It did not answer in HTTP with a length: {head[:80]!r}.")
            body = await self._reader.readexactly(int(length[1]))
        except asyncio.IncompleteReadError as error:
            raise JobFailed("A connection was closed before the response.") from error
        status = int(head[9:12])
        if status in (429, 503):
            return float(match[1]) if (match := _RETRY_AFTER.search(head)) else 0.0
        if status != 200:
            raise JobFailed(f"It answered {status}: {body[:300].decode(errors='replace')}")
        return None


def _take_turns(iterators: Sequence[Iterator[bytes]]) -> Iterator[bytes]:
    while True:
        yield from map(next, iterators)


def generate_requests(run: str, batch: int, host: str, key: str | None, first: int = 0) -> Iterator[bytes]:
    """Generate an endless sequence of HTTP requests of one run, `batch` observations each, with steps from `first`."""
    authorization = f"Authorization: Bearer {key}\r\n" if key else ""
    head = (
        f"POST /api/v1/runs/{run}/observations HTTP/1.1\r\nHost: {host}\r\n{authorization}"
        "Content-Type: application/json\r\nContent-Length: "
    ).encode()
    templates = prepare_templates(batch)
    while True:
        items = templates[first // batch % len(templates)] % tuple(range(first, first + batch))
        length = len(_OPENING) + len(items) + len(_CLOSING)
        yield b"%s%d\r\n\r\n%s%s%s" % (head, length, _OPENING, items, _CLOSING)
        first += batch


@cache
def prepare_templates(batch: int) -> list[bytes]:
    """The items of consecutive batches without their steps, which are formatted during the measurement."""
    items = [
        b'{"metric":"%s","step":%%d,"value":%.5f}' % (metric.encode(), compute_value(metric, number))
        for number, metric in zip(range(PERIOD), itertools.cycle(METRICS), strict=False)
    ]
    return [b",".join(items[start : start + batch]) for start in range(0, PERIOD - batch + 1, batch)]


def compute_value(metric: str, number: int) -> float:
    """The value of observation `number` of a run that improves more and more slowly and does not turn."""
    progress, noise = number / 2000, _NOISE[number % PERIOD]
    match metric:
        case "loss":
            return 0.5 + math.exp(-progress) + noise
        case "kl":
            return 4 * math.sqrt(progress) + abs(noise)
        case _:
            return 1 - math.exp(-progress) + noise


def find_percentile(ascending: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed; NaN without values."""
    return ascending[max(math.ceil(share * len(ascending)) - 1, 0)] if ascending else math.nan
