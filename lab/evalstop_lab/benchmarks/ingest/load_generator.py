"""The load generator, a worker process: each client posts its next batch as soon as the last one is answered.

General load generators send a fixed body; here each request has new steps, which are formatted during the measurement,
and acknowledged observations are counted to compare them with the stored ones.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import math
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import cast

import httptools
import msgspec
import uvloop

from evalstop_lab.benchmarks.ingest import payloads
from evalstop_lab.errors import LabError

RESPONSE_TIMEOUT_SECONDS = 60.0


class LoadRefused(LabError):
    """A server refused a valid request."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One load. Client i posts to the runs i, i + clients, ... in turns.

    `addresses`: each client posts to one of them.
    `format`: a name in `payloads.FORMATS`.
    `first_step`: the step of each run's first observation.
    `requests`: the number per client; None: limited only by time.
    """

    addresses: tuple[tuple[str, int], ...]
    format: str
    runs: tuple[str, ...]
    clients: int
    batch: int
    seconds: float
    key: str | None = None
    first_step: int = 0
    requests: int | None = None


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a job. `observations` are those acknowledged by a response.

    `retried`: requests that were answered 503 or 429 and sent again.
    `generator_cpu`: CPU time of this process, as a share of one core.
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


class _Client:
    """Posts its requests in order, one at a time."""

    def __init__(self, job: Job, number: int) -> None:
        self._address = job.addresses[number % len(job.addresses)]
        form, host = payloads.FORMATS[job.format], "{}:{}".format(*self._address)
        self._requests = _take_turns(
            [
                payloads.generate_requests(form, run, job.batch, host, job.key, job.first_step)
                for run in job.runs[number :: job.clients]
            ]
        )
        self._remaining = job.requests if job.requests is not None else -1
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.latencies: list[float] = []
        self.retried = 0

    async def connect(self) -> None:
        loop = asyncio.get_running_loop()
        _, self.connection = await loop.create_connection(partial(_Connection, self), *self._address)

    def start(self, deadline: float) -> None:
        self._deadline = deadline
        self._post_next()

    def _post_next(self) -> None:
        if time.perf_counter() >= self._deadline or self._remaining == 0:
            if not self.done.done():
                self.done.set_result(None)
            return
        self._remaining -= 1
        self._request = next(self._requests)
        self._sent_at = time.perf_counter()
        self._send()

    def _send(self) -> None:
        if self.connection.transport.is_closing():  # servers may close idle connections
            self._reconnecting = asyncio.get_running_loop().create_task(self._reconnect())
        else:
            self.connection.send(self._request)

    async def _reconnect(self) -> None:
        try:
            await self.connect()
            self.connection.send(self._request)
        except OSError as error:
            self.fail(error)

    def receive(self, status: int, retry_after_seconds: float, body: bytes) -> None:
        if status == 200:
            self.latencies.append(time.perf_counter() - self._sent_at)
            self._post_next()
        elif status in (429, 503):
            self.retried += 1
            asyncio.get_running_loop().call_later(retry_after_seconds, self._send)
        else:
            self.fail(LoadRefused(f"It answered {status}: {body[:300].decode(errors='replace')}"))

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)


def _take_turns(iterators: Sequence[Iterator[bytes]]) -> Iterator[bytes]:
    while True:
        yield from map(next, iterators)


class _Connection(asyncio.Protocol):
    """One HTTP connection; the parser calls the methods `on_...` with the parts of a response."""

    def __init__(self, client: _Client) -> None:
        self._client = client
        self._parser = httptools.HttpResponseParser(self)
        self._awaits_response = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's class does not derive from it

    def send(self, request: bytes) -> None:
        self._awaits_response = True
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._client.fail(LoadRefused(f"It did not answer in HTTP: {error}"))

    def on_message_begin(self) -> None:
        self._retry_after_seconds, self._body = 0.0, b""

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"retry-after":
            self._retry_after_seconds = float(value)

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        self._awaits_response = False
        self._client.receive(self._parser.get_status_code(), self._retry_after_seconds, self._body)

    def connection_lost(self, error: Exception | None) -> None:
        if self._awaits_response:
            self._client.fail(LoadRefused(f"A connection was closed before the response: {error or 'by the server'}"))


async def generate_load(job: Job) -> Load:
    """Run the job; returns after every request has been answered."""
    payloads.prepare_templates(payloads.FORMATS[job.format], job.batch)  # fills its cache before the measurement
    clients = [_Client(job, number) for number in range(job.clients)]
    await asyncio.gather(*(client.connect() for client in clients))
    gc.collect()
    gc.disable()  # a pause of the generator would be attributed to the server
    started, cpu = time.perf_counter(), time.process_time()
    try:
        for client in clients:
            client.start(started + job.seconds)
        await asyncio.wait_for(
            asyncio.gather(*(client.done for client in clients)), job.seconds + RESPONSE_TIMEOUT_SECONDS
        )
    finally:
        gc.enable()
        for client in clients:
            client.connection.transport.close()
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


def find_percentile(ascending: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed; NaN without values."""
    return ascending[max(math.ceil(share * len(ascending)) - 1, 0)] if ascending else math.nan


def main() -> int:
    """Run jobs from standard input until it ends."""
    loop = uvloop.new_event_loop()
    for line in sys.stdin:
        try:
            answer = msgspec.json.encode(loop.run_until_complete(generate_load(msgspec.json.decode(line, type=Job))))
        except (LabError, OSError, TimeoutError) as error:
            answer = msgspec.json.encode({"error": f"{type(error).__name__}: {error}"})
        sys.stdout.write(answer.decode() + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
