"""The load generator, a process of its own: many clients that post one batch after another, each as fast as answered.

It reads one job a line of standard input and writes what came of it as one line of JSON.
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

import msgspec
import uvloop

from evalstop_lab.benchmarks import dialects
from evalstop_lab.benchmarks.wire import Answer, Answers
from evalstop_lab.errors import LabError

LONGEST_ANSWER_SECONDS = 60.0


class LoadRefused(LabError):
    """The load could not be brought: a server refused what it had to take."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One load. Client number i has the runs i, i + clients, ... and posts to them in turn.

    `addresses`: a client posts to one of them, or to one after another when `sprayed`.
    """

    addresses: tuple[tuple[str, int], ...]
    dialect: str
    runs: tuple[str, ...]
    clients: int
    batch: int
    seconds: float
    key: str | None = None
    metrics: tuple[str, ...] = dialects.MIX
    sprayed: bool = False
    first: int = 0  # the step of each run's first observation
    requests: int | None = None  # of each client; None: as many as the time allows
    expects: str = ""  # must stand in each answer


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a job. Observations count when the answer that acknowledges them has arrived."""

    observations: int
    requests: int
    refused: int  # answered 503 or 429, waited and sent again
    seconds: float
    p50_ms: float
    p99_ms: float
    generator_cpu: float  # of one core

    @property
    def per_second(self) -> float:
        return self.observations / self.seconds


class _Client:
    """Posts its requests in order, one under way at a time."""

    def __init__(self, job: Job, number: int) -> None:
        self._job = job
        runs = job.runs[number :: job.clients]
        dialect = dialects.DIALECTS[job.dialect]
        host = "{}:{}".format(*job.addresses[0])
        each = [dialects.requests(dialect, run, job.batch, host, job.key, job.metrics, job.first) for run in runs]
        self._requests = _in_turn(each)
        self._left = job.requests if job.requests is not None else -1
        self._expects = job.expects.encode()
        self.sockets: dict[int, _Socket] = {}
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.latencies: list[float] = []
        self.refused = 0
        self._turns = list(range(len(job.addresses))) if job.sprayed else [number % len(job.addresses)]
        self._turn = itertools.cycle(self._turns)

    async def connect(self) -> None:
        for place in self._turns:
            await self._connect(place)

    async def _connect(self, place: int) -> _Socket:
        loop = asyncio.get_running_loop()
        _, socket = await loop.create_connection(partial(_Socket, self), *self._job.addresses[place])
        self.sockets[place] = socket
        return socket

    def begin(self, deadline: float) -> None:
        self._deadline = deadline
        self._next()

    def _next(self) -> None:
        if time.perf_counter() >= self._deadline or self._left == 0:
            if not self.done.done():
                self.done.set_result(None)
            return
        self._left -= 1
        self._request = next(self._requests)
        self._begun = time.perf_counter()
        self._send()

    def _send(self) -> None:
        place = next(self._turn)
        socket = self.sockets[place]
        if socket.transport.is_closing():  # a server may close what has been idle for some seconds
            self._again = asyncio.get_running_loop().create_task(self._send_anew(place))
        else:
            socket.ask(self._request)

    async def _send_anew(self, place: int) -> None:
        try:
            (await self._connect(place)).ask(self._request)
        except OSError as error:
            self.fail(error)

    def answered(self, answer: Answer) -> None:
        if answer.status == 200 and self._expects in answer.body:
            self.latencies.append(time.perf_counter() - self._begun)
            self._next()
        elif answer.status in (429, 503):
            self.refused += 1
            asyncio.get_running_loop().call_later(answer.retry_after_seconds, self._send)
        else:
            self.fail(LoadRefused(f"It answered {answer.status}: {answer.body[:300].decode(errors='replace')}"))

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)


def _in_turn(each: Sequence[Iterator[bytes]]) -> Iterator[bytes]:
    while True:
        yield from map(next, each)


class _Socket(asyncio.Protocol):
    def __init__(self, client: _Client) -> None:
        self._client = client
        self._answers = Answers()
        self._asked = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # of uvloop, which derives from no class of asyncio's

    def ask(self, request: bytes) -> None:
        self._asked = True
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        try:
            answer = self._answers.feed(data)
        except (LabError, ValueError) as error:
            self._client.fail(error)
            return
        if answer is not None:
            self._asked = False
            self._client.answered(answer)

    def connection_lost(self, error: Exception | None) -> None:
        if self._asked:
            self._client.fail(LoadRefused(f"A connection was closed before the answer: {error or 'by the server'}"))


async def bring(job: Job) -> Load:
    """Bring the load; returns when every request that was begun is answered."""
    dialects.templates(dialects.DIALECTS[job.dialect], job.batch, job.metrics)  # takes its time; then they are there
    clients = [_Client(job, number) for number in range(job.clients)]
    await asyncio.gather(*(client.connect() for client in clients))
    gc.collect()
    gc.disable()  # a pause of the generator would be taken for one of the server
    begun, cpu = time.perf_counter(), time.process_time()
    try:
        for client in clients:
            client.begin(begun + job.seconds)
        await asyncio.wait_for(
            asyncio.gather(*(client.done for client in clients)), job.seconds + LONGEST_ANSWER_SECONDS
        )
    finally:
        gc.enable()
        for socket in itertools.chain.from_iterable(client.sockets.values() for client in clients):
            socket.transport.close()
    seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
    latencies = sorted(itertools.chain.from_iterable(client.latencies for client in clients))
    return Load(
        observations=len(latencies) * job.batch,
        requests=len(latencies),
        refused=sum(client.refused for client in clients),
        seconds=seconds,
        p50_ms=percentile(latencies, 0.5) * 1000,
        p99_ms=percentile(latencies, 0.99) * 1000,
        generator_cpu=cpu / seconds,
    )


def percentile(ascending: Sequence[float], share: float) -> float:
    """The smallest value that so large a share of the values does not exceed; NaN of none."""
    return ascending[max(math.ceil(share * len(ascending)) - 1, 0)] if ascending else math.nan


def main() -> int:
    """Bring one load after another until standard input ends."""
    loop = uvloop.new_event_loop()
    for line in sys.stdin:
        try:
            answer = msgspec.json.encode(loop.run_until_complete(bring(msgspec.json.decode(line, type=Job))))
        except (LabError, OSError, TimeoutError) as error:
            answer = msgspec.json.encode({"error": f"{type(error).__name__}: {error}"})
        sys.stdout.write(answer.decode() + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
