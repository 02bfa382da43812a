"""Parses HTTP/1.1 responses on a connection with one request at a time."""

from __future__ import annotations

from typing import NamedTuple

from evalstop_lab.errors import LabError


class InvalidResponse(LabError):
    """The client cannot parse the server's response."""


class Response(NamedTuple):
    """One response: its status, its status line and headers as received, and its body."""

    status: int
    head: bytes
    body: bytes

    @property
    def retry_after_seconds(self) -> float:
        """The value of Retry-After; 0 without that header."""
        return float(_find_header(self.head.lower(), b"retry-after") or 0)


class ResponseParser:
    """Parses the responses of one connection."""

    def __init__(self) -> None:
        self._buffer = b""

    def feed(self, data: bytes) -> Response | None:
        """Add received bytes; returns the response once it is complete."""
        data = self._buffer + data if self._buffer else data
        self._buffer = data
        end = data.find(b"\r\n\r\n")
        if end < 0:
            return None
        if not data.startswith(b"HTTP/1."):
            raise InvalidResponse(f"It starts with {data[:20]!r}.")
        head = data[:end]
        status = int(head[9:12])
        if status == 100:  # the final response follows
            self._buffer = b""
            return self.feed(data[end + 4 :])
        body = _read_body(head.lower(), data[end + 4 :], status)
        if body is None:
            return None
        self._buffer = b""
        return Response(status, head, body)


def _read_body(head: bytes, data: bytes, status: int) -> bytes | None:
    length = _find_header(head, b"content-length")
    if length is not None:
        if len(data) < int(length):
            return None
        if len(data) > int(length):
            raise InvalidResponse("It is longer than its Content-Length.")
        return data
    if _find_header(head, b"transfer-encoding") == b"chunked":
        return _read_chunks(data)
    if status in (204, 304):
        return b""
    raise InvalidResponse("It has neither a Content-Length nor chunks.")


def _read_chunks(data: bytes) -> bytes | None:
    body, at = b"", 0
    while True:
        line_end = data.find(b"\r\n", at)
        if line_end < 0:
            return None
        size = int(data[at:line_end].partition(b";")[0], 16)
        start = line_end + 2
        if len(data) < start + size + 2:
            return None
        if size == 0:
            return body
        body += data[start : start + size]
        at = start + size + 2


def _find_header(lower_head: bytes, name: bytes) -> bytes | None:
    start = lower_head.find(b"\r\n" + name + b":")
    if start < 0:
        return None
    start += len(name) + 3
    end = lower_head.find(b"\r\n", start)
    return lower_head[start : end if end >= 0 else None].strip()
