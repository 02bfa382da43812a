"""Limits what exhausts the server: clients that send or read too slowly, too many of them, and hostile headers.

uvicorn has a timeout for idle connections, which starts only after an answer, and `limit_concurrency`, with which idle
connections make it answer everyone else 503. None of that stops these attacks, so its protocol is subclassed:

- Slowloris: a client sends the head or the body of a request one byte at a time, and holds a connection for hours.
- Many headers: short ones take thirty times their size in memory, on each connection.
- Trailers: uvicorn adds all headers after a body, which no limit counts, to those of the request.
- Quoted cookies: Python before 3.11.10 unquotes one in the square of its length, which takes half a minute.
- Slow read: a client asks for large answers and never reads them; uvicorn buffers them all in memory.
- Connection flood: idle connections exhaust the process's file descriptors, so that no other is accepted.

All connections are checked against their limits once a second, at no cost to a busy connection.
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

from evalstop_service.web.problem_kinds import ProblemKind

MIN_BYTES_PER_SECOND = 64 * 1024
"""The minimum rate of a request or an answer of any size."""

MAX_HEAD_BYTES, MOST_HEADERS = 64 * 1024, 200
"""Limits of a request's head. Each header takes some hundred bytes of memory."""

MAX_UNREAD_BYTES = 256 * 2**20
"""Limit for all answers together; beyond it the largest are dropped."""

KEEP_ALIVE_SECONDS = 75
"""How long a connection may be idle between requests: longer than load balancers keep theirs by default, 60 s. One that
sends a post into a connection being closed answers it 502."""

_RESET = struct.pack("ii", 1, 0)

LAST_BODY_SECONDS = 2.0
"""How long a body may still arrive when the server shuts down."""

SPARE_FILES = 128
"""File descriptors kept for the database, deliveries and connections being refused."""


@dataclass(frozen=True)
class ConnectionLimits:
    """The limits of one server.

    `request_seconds`: from a request's first byte, or the start of the connection, to its last byte. `answer_seconds`:
    for the client to read an answer. Both grow by a second for every 64 KiB. `connections`: the most open ones; beyond
    that, those that have waited for their clients longest are closed.
    """

    request_seconds: float = 20.0
    answer_seconds: float = 30.0
    connections: int = 10_000


class CoalescingTransport:
    """A transport that writes the headers of an answer together with its body, which halves the system calls.

    A chunk waits for the next one until the end of this iteration of the event loop.
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


class LimitedConnection(HttpToolsProtocol):
    """One connection with limits.

    `request_since`: when the arriving request, or the connection, began; None between requests.
    """

    limits = ConnectionLimits()

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.request_since: float | None = None
        self._request_bytes = 0
        self._in_head = True
        self._unread_since: float | None = None
        self._unread_peak = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(cast(asyncio.Transport, CoalescingTransport(transport, self.loop)))
        self.request_since = self.loop.time()
        if len(self.connections) > self.limits.connections:
            self._make_room()

    def data_received(self, data: bytes) -> None:
        if self.request_since is None:
            self.request_since = self.loop.time()
        self._request_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._request_bytes > MAX_HEAD_BYTES:
            self._refuse(431, f"the headers exceed {MAX_HEAD_BYTES} bytes; nothing was stored. Send fewer headers")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:  # a trailer, of which there may be any number, and with which no proxy reckons
            return
        if b"\\" in value and name.lower() == b"cookie":  # slow to unquote, and none of the service's own has one
            value = b";".join(cookie for cookie in value.split(b";") if b"\\" not in cookie)
        if len(self.headers) == MOST_HEADERS:
            raise ValueError("too many headers")  # uvicorn calls `send_400_response`
        super().on_header(name, value)

    def send_400_response(self, msg: str) -> None:
        if self._in_head and len(self.headers) == MOST_HEADERS:
            self._refuse(431, f"it has more than {MOST_HEADERS} headers; nothing was stored. Send fewer")
        else:
            super().send_400_response(msg)

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self.request_since, self._request_bytes, self._in_head = None, 0, True

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unread_since = None

    def shutdown(self) -> None:
        super().shutdown()
        self.loop.call_later(LAST_BODY_SECONDS, self._refuse_incomplete_request)

    @property
    def waits_for_client(self) -> bool:
        """Whether the client has sent no complete request that is still unanswered."""
        return self.request_since is not None or self.cycle is None or self.cycle.response_complete

    @property
    def unread_bytes(self) -> int:
        """Bytes of answers that the client has not read yet."""
        return self.transport.get_write_buffer_size() if self.transport is not None else 0

    def drop(self) -> None:
        """Reset the connection and discard unsent data, including the kernel's buffer."""
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.transport.abort()

    def close_if_slow(self, now: float) -> None:
        """Close the connection if its client is too slow."""
        if self.transport is None:
            return
        if self._is_read_too_slowly(now):
            self.drop()
        elif self.transport.is_closing() or self.request_since is None:
            return
        elif self.flow.read_paused:  # the client waits for the server
            self.request_since, self._request_bytes = now, 0
        elif now - self.request_since > self.limits.request_seconds + self._request_bytes / MIN_BYTES_PER_SECOND:
            if self._request_bytes == 0:  # no request to answer
                self.transport.close()
            else:
                self._refuse(
                    408,
                    f"the request did not arrive within {self.limits.request_seconds:g} seconds; nothing of it was "
                    "stored, send the same again",
                )

    def _refuse_incomplete_request(self) -> None:
        """Refuse a request whose body is still arriving when the server shuts down, which would wait for it."""
        if not self._in_head and not self.pipeline and self.cycle.more_body:
            self._refuse(503, "the service is shutting down; nothing was stored. Send the same request again")

    def _is_read_too_slowly(self, now: float) -> bool:
        unread = self.unread_bytes
        if unread == 0:
            self._unread_since = None
            return False
        if self._unread_since is None:
            self._unread_since, self._unread_peak = now, unread
        self._unread_peak = max(self._unread_peak, unread)
        return now - self._unread_since > self.limits.answer_seconds + self._unread_peak / MIN_BYTES_PER_SECOND

    def _make_room(self) -> None:
        """Close the connections that have waited for their clients longest; several at once, since finding them is
        slow."""
        other_connections = (
            connection
            for connection in self.connections
            if isinstance(connection, LimitedConnection) and connection is not self
        )
        waiting = [
            connection
            for connection in other_connections
            if connection.waits_for_client and not connection.transport.is_closing()
        ]
        for connection in nsmallest(max(1, self.limits.connections // 100), waiting, key=_waiting_since):
            connection.drop()
        if not waiting:
            self._refuse(503, "too many connections; nothing was stored. Send the same request again in a second")

    def _refuse(self, status: int, detail: str) -> None:
        """Answer in place of the app, unless it has begun to answer, and close the connection."""
        if self.transport.is_closing():
            return
        cycle = self.cycle
        if (cycle is None or cycle.response_complete) if self._in_head else not cycle.response_started:
            self.transport.write(_answer(status, detail))
        self.transport.close()


def close_slow_connections(connections: Iterable[Any], now: float) -> None:
    """Close the connections whose clients are too slow; `now` is the event loop's time."""
    watched = [connection for connection in connections if isinstance(connection, LimitedConnection)]
    for connection in watched:
        connection.close_if_slow(now)
    unread = sum(connection.unread_bytes for connection in watched)
    if unread <= MAX_UNREAD_BYTES:
        return
    for connection in sorted(watched, key=lambda connection: connection.unread_bytes, reverse=True):
        unread -= connection.unread_bytes
        connection.drop()
        if unread <= MAX_UNREAD_BYTES // 2:
            return


def allowed_connections(requested: int, reserved: int) -> int:
    """How many of the wanted connections the process may open in addition to `reserved` other files.

    Raises the process's limit on open files as far as the system allows.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = requested + SPARE_FILES + reserved
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return requested
    if soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    return max(1, min(requested, soft - SPARE_FILES - reserved))


def _waiting_since(connection: LimitedConnection) -> float:
    return connection.request_since or 0.0


def _answer(status: int, detail: str) -> bytes:
    title = HTTPStatus(status).phrase
    problem = {
        "type": ProblemKind.OTHER.uri,
        "code": ProblemKind.OTHER.code,
        "title": title,
        "status": status,
        "detail": detail,
        "instance": "",
    }
    body = json.dumps(problem).encode()
    retry_header = "Retry-After: 1\r\n" if status == 503 else ""
    head = (
        f"HTTP/1.1 {status} {title}\r\nContent-Type: application/problem+json\r\n{retry_header}"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


def create_protocol(limits: ConnectionLimits) -> type[LimitedConnection]:
    """The protocol class for uvicorn, with these limits."""
    return type("Connection", (LimitedConnection,), {"limits": limits})
