"""The sink of `make bench-webhooks`: takes every POST, says 204 and does nothing else, so that senders are measured."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import uvloop

from evalstop_lab.service_process import end

NO_CONTENT = b"HTTP/1.1 204 No Content\r\n\r\n"


class Sink(asyncio.Protocol):
    """One connection. Requests come one after another, each with its Content-Length."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)
        self._buffer = b""

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while True:
            head, separator, rest = self._buffer.partition(b"\r\n\r\n")
            if not separator:
                return
            length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
            if len(rest) < length:
                return
            self._buffer = rest[length:]
            self._transport.write(NO_CONTENT)


@contextmanager
def run_sink() -> Iterator[str]:
    """A sink in a process of its own; its URL."""
    command = [sys.executable, "-m", "evalstop_lab.benchmarks.webhook_sink"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["url"]
    finally:
        end(process)


async def serve() -> None:
    """Listen on a free port, and say which."""
    server = await asyncio.get_running_loop().create_server(Sink, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    sys.stdout.write(json.dumps({"url": f"http://{host}:{port}/"}) + "\n")
    sys.stdout.flush()
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve())
