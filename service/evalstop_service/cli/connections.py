"""What uvicorn's protocol lacks and no proxy does for it: bounded heads of requests.

A proxy with TLS stands in front of whatever strangers reach: it cuts off clients that send or read too slowly. These it
passes on, so they are bounded here:

- Many headers: short ones take thirty times their size in memory, on each connection.
- Trailers: uvicorn adds all headers after a body, which no limit counts, to those of the request.
- Quoted cookies: Python before 3.11.10 unquotes one in the square of its length, which takes half a minute.
"""

from __future__ import annotations

import resource
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES, MOST_HEADERS = 64 * 1024, 200
"""Limits of a request's head. Each header takes some hundred bytes of memory."""

KEEP_ALIVE_SECONDS = 75
"""How long a connection may be idle between requests: longer than load balancers keep theirs by default, 60 s. One that
sends a post into a connection being closed answers it 502."""

SPARE_FILES = 128
"""File descriptors kept for the database, deliveries and connections being refused."""


class BoundedConnection(HttpToolsProtocol):
    """One connection, whose requests have bounded heads; a longer one is answered 400."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._request_bytes = 0
        self._in_head = True

    def data_received(self, data: bytes) -> None:
        self._request_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._request_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            if self.cycle is None or self.cycle.response_complete:
                self.send_400_response(f"The headers exceed {MAX_HEAD_BYTES} bytes.")
            self.transport.close()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:  # a trailer, of which there may be any number, and with which no proxy reckons
            return
        if b"\\" in value and name.lower() == b"cookie":  # slow to unquote, and none of the service's own has one
            value = b";".join(cookie for cookie in value.split(b";") if b"\\" not in cookie)
        if len(self.headers) == MOST_HEADERS:
            raise ValueError("too many headers")  # uvicorn answers 400
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._request_bytes, self._in_head = 0, True


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
