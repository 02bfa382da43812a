"""The upper bound of `make bench-ingest`: the throughput that Python and the database allow for the same rows.

A minimal ASGI app on uvicorn and uvloop that decodes a batch, commits its rows together with those of all waiting
requests (one commit at a time), and answers with their number. It writes the same rows with the same statement as the
service, but has no keys, detectors, limits or further validation.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import asyncpg
import msgspec
import uvicorn
from evalstop_service.store.ingest import SAVE

from evalstop_lab.benchmarks.processes import libpq_url


class Observation(msgspec.Struct, forbid_unknown_fields=True):
    """One observation of a batch."""

    metric: str
    step: int
    value: float | str
    stderr: float | None = None
    time: str | None = None


class Batch(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a request."""

    observations: list[Observation]


@dataclass(frozen=True)
class Request:
    """A batch waiting for its commit."""

    run: UUID
    observations: list[Observation]
    committed: asyncio.Future[None]


class PostgresStore:
    """Uses the service's own statement, which updates runs from their known versions and inserts observations."""

    def __init__(self, url: str) -> None:
        self._url = libpq_url(url)
        self._connection: Any = None
        self._versions: dict[UUID, int] = {}

    async def save(self, requests: Sequence[Request]) -> None:
        if self._connection is None:
            self._connection = await asyncpg.connect(self._url, server_settings={"jit": "off", "timezone": "UTC"})
        last_steps = _find_last_steps(requests)
        unknown = [run for run in last_steps if run not in self._versions]
        if unknown:
            rows = await self._connection.fetch("SELECT id, version FROM runs WHERE id = ANY($1)", unknown)
            self._versions.update({UUID(str(row["id"])): row["version"] for row in rows})
        ids = sorted(last_steps)
        unchanged = [None] * len(ids)
        rows = [(request.run, item) for request in requests for item in request.observations]
        saved = await self._connection.fetch(
            SAVE,
            datetime.now(UTC),
            ids,
            [self._versions[run] for run in ids],
            [last_steps[run] for run in ids],
            *(unchanged, unchanged, unchanged),  # verdict, best checkpoint, raw maximum
            [run for run, _ in rows],
            [item.metric for _, item in rows],
            [item.step for _, item in rows],
            [item.value for _, item in rows],
            [item.stderr for _, item in rows],
            [item.time for _, item in rows],
        )
        if len(saved) != len(ids):
            raise RuntimeError("another process has written to these runs")
        for run in ids:
            self._versions[run] += 1


def _find_last_steps(requests: Sequence[Request]) -> dict[UUID, int]:
    last_steps: dict[UUID, int] = {}
    for request in requests:
        last_steps[request.run] = max(last_steps.get(request.run, 0), request.observations[-1].step)
    return last_steps


Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


@dataclass
class App:
    """Serves only POST /api/v1/runs/{id}/observations."""

    store: PostgresStore
    waiting: list[Request] = field(default_factory=list)
    committing: asyncio.Task[None] | None = None
    decoder: msgspec.json.Decoder[Batch] = field(default_factory=lambda: msgspec.json.Decoder(Batch))

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        observations = self.decoder.decode(body).observations
        loop = asyncio.get_running_loop()
        request = Request(UUID(scope["path"].split("/")[4]), observations, loop.create_future())
        self.waiting.append(request)
        if self.committing is None:
            self.committing = loop.create_task(self._commit())
        await request.committed
        answer = b'{"accepted":%d}' % len(observations)
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(answer))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    async def _commit(self) -> None:
        while self.waiting:
            requests, self.waiting = self.waiting, []
            try:
                await self.store.save(requests)
            except Exception as error:
                for request in requests:
                    request.committed.set_exception(error)
            else:
                for request in requests:
                    request.committed.set_result(None)
        self.committing = None


def main() -> None:
    """Serve on a free port and print its URL; the argument is the database's URL."""
    config = uvicorn.Config(
        App(PostgresStore(sys.argv[1])),
        port=0,
        loop="uvloop",
        http="httptools",
        lifespan="off",
        access_log=False,
        log_level="error",
    )
    with config.bind_socket() as listener:
        listener.listen(config.backlog)  # so that the reader of the URL can connect immediately
        sys.stdout.write(f'{{"url":"http://127.0.0.1:{listener.getsockname()[1]}"}}\n')
        sys.stdout.flush()
        uvicorn.Server(config).run([listener])


if __name__ == "__main__":
    main()
