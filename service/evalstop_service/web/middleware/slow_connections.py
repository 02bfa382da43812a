"""Connections that hold the service up: slow to ask, slow to listen, or simply too many. They are closed.

A request has to arrive, an answer has to be taken: whoever is too slow at it is cut off. The web server knows no such
limits, so its protocol for one connection is extended here; all connections are looked over once a second, which costs
a busy one nothing.
"""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from heapq import nsmallest
from http import HTTPStatus
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

BYTES_A_SECOND = 64 * 1024
"""What a request or an answer of any size has to move by in the long run."""

MOST_HEAD_BYTES = 64 * 1024

MOST_UNTAKEN_BYTES = 256 * 2**20
"""Of all answers together: past this the largest are given up."""

_AT_ONCE = struct.pack("ii", 1, 0)

SPARE_FILES = 128
"""Of those that the process may open: for the database, deliveries, and what is being refused."""


@dataclass(frozen=True)
class Patience:
    """How long a client may take.

    `request_seconds`: from a request's first byte, or the connection's beginning, to its last byte. `answer_seconds`:
    for an answer to be taken. A second more is given for every 64 KiB. `connections`: the most at one time; for one
    more, those are closed that have waited for their clients longest. `streamed`: paths whose routes take requests in
    while they arrive, watch their pace by themselves, and answer with what has been stored.
    """

    request_seconds: float = 20.0
    answer_seconds: float = 30.0
    connections: int = 10_000
    streamed: frozenset[str] = frozenset()


class Coalescing:
    """A transport that writes two pieces at once: an answer's head goes with its body, at half of the system's calls.

    A piece waits for the next one, and for no longer than this turn of the event loop. All else is the transport's own.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._waiting = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if self._waiting:
            waiting, self._waiting = self._waiting, b""
            self._transport.writelines((waiting, data))
        elif data:
            self._waiting = data
            self._loop.call_soon(self._flush)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def get_write_buffer_size(self) -> int:
        return self._transport.get_write_buffer_size() + len(self._waiting)

    def _flush(self) -> None:
        if self._waiting:
            waiting, self._waiting = self._waiting, b""
            self._transport.write(waiting)


class Connection(HttpToolsProtocol):
    """One connection, with an eye on the clock.

    `asking_since`: when the request that is arriving began, or the connection; None between requests.
    """

    patience = Patience()

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.asking_since: float | None = None
        self._asked_bytes = 0
        self._in_head = True
        self._untaken_since: float | None = None
        self._untaken_most = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(cast(asyncio.Transport, Coalescing(transport, self.loop)))
        self.asking_since = self.loop.time()
        if len(self.connections) > self.patience.connections:
            self._make_room()

    def data_received(self, data: bytes) -> None:
        if self.asking_since is None:
            self.asking_since = self.loop.time()
        self._asked_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._asked_bytes > MOST_HEAD_BYTES:
            self._refuse(431, f"the headers hold over {MOST_HEAD_BYTES} bytes; nothing was stored, send fewer")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self.asking_since, self._asked_bytes, self._in_head = None, 0, True

    def resume_writing(self) -> None:
        super().resume_writing()
        self._untaken_since = None

    @property
    def waits_for_client(self) -> bool:
        """Whether nothing, or only a part of a request, has come that is not answered yet."""
        return self.asking_since is not None or self.cycle is None or self.cycle.response_complete

    @property
    def untaken_bytes(self) -> int:
        """Of answers, those that the client has not taken yet."""
        return self.transport.get_write_buffer_size() if self.transport is not None else 0

    def drop(self) -> None:
        """Close the connection at once, giving up what was to be sent; the system too is to keep none of it."""
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
        self.transport.abort()

    def look_over(self, now: float) -> None:
        """Close the connection if its client has been too slow."""
        if self.transport is None:
            return
        if self._is_untaken_for_too_long(now):
            self.drop()
        elif self.transport.is_closing() or self.asking_since is None:
            return
        elif self.flow.read_paused or self._is_being_taken_in():  # it is we who keep it waiting
            self.asking_since, self._asked_bytes = now, 0
        elif now - self.asking_since > self.patience.request_seconds + self._asked_bytes / BYTES_A_SECOND:
            if self._asked_bytes == 0:  # nothing to answer
                self.transport.close()
            else:
                self._refuse(
                    408,
                    f"the request did not arrive within {self.patience.request_seconds:g} seconds; nothing of it was "
                    "stored, send the same again",
                )

    def _is_being_taken_in(self) -> bool:
        cycle = self.cycle
        if self._in_head or cycle is None or cycle.response_complete:
            return False
        return cycle.scope["path"] in self.patience.streamed

    def _is_untaken_for_too_long(self, now: float) -> bool:
        untaken = self.untaken_bytes
        if untaken == 0:
            self._untaken_since = None
            return False
        if self._untaken_since is None:
            self._untaken_since, self._untaken_most = now, untaken
        self._untaken_most = max(self._untaken_most, untaken)
        return now - self._untaken_since > self.patience.answer_seconds + self._untaken_most / BYTES_A_SECOND

    def _make_room(self) -> None:
        """Close the connections that have waited for their clients longest; finding them is slow, so some at a time."""
        others = (other for other in self.connections if isinstance(other, Connection) and other is not self)
        waiting = [other for other in others if other.waits_for_client and not other.transport.is_closing()]
        for other in nsmallest(max(1, self.patience.connections // 100), waiting, key=_waiting_since):
            other.drop()
        if not waiting:
            self._refuse(503, "there are too many connections; nothing was stored, send the same again in a second")

    def _refuse(self, status: int, detail: str) -> None:
        """Answer for an app that has not been asked, or not completely, and close."""
        if self.transport.is_closing():
            return
        cycle = self.cycle
        if (cycle is None or cycle.response_complete) if self._in_head else not cycle.response_started:
            self.transport.write(_answer(status, detail))
        self.transport.close()


def look_over(connections: Iterable[Any], now: float) -> None:
    """Close the connections whose clients have been too slow; `now` is the event loop's time."""
    watched = [connection for connection in connections if isinstance(connection, Connection)]
    for connection in watched:
        connection.look_over(now)
    untaken = sum(connection.untaken_bytes for connection in watched)
    if untaken <= MOST_UNTAKEN_BYTES:
        return
    for connection in sorted(watched, key=lambda connection: connection.untaken_bytes, reverse=True):
        untaken -= connection.untaken_bytes
        connection.drop()
        if untaken <= MOST_UNTAKEN_BYTES // 2:
            return


def allowed(wanted: int, reserved: int) -> int:
    """How many connections of those wanted the process may have open, beside `reserved` other files.

    The system's limit is raised as far as it lets us.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted + SPARE_FILES + reserved
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    if soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    return max(1, min(wanted, soft - SPARE_FILES - reserved))


def _waiting_since(connection: Connection) -> float:
    return connection.asking_since or 0.0


def _answer(status: int, detail: str) -> bytes:
    title = HTTPStatus(status).phrase
    problem = {"type": "about:blank", "title": title, "status": status, "detail": detail, "instance": ""}
    body = json.dumps(problem).encode()
    again = "Retry-After: 1\r\n" if status == 503 else ""
    head = (
        f"HTTP/1.1 {status} {title}\r\nContent-Type: application/problem+json\r\n{again}"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


def protocol(patience: Patience) -> type[Connection]:
    """The protocol that a web server is to speak on its connections."""
    return type("PatientConnection", (Connection,), {"patience": patience})
