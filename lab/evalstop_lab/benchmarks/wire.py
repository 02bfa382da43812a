"""HTTP/1.1 as a lean client needs it: requests that are ready to send, answers cut out of the bytes as they come."""

from __future__ import annotations

from typing import NamedTuple

from evalstop_lab.errors import LabError


class BrokenAnswer(LabError):
    """A server's answer is not HTTP that this client reads."""


class Answer(NamedTuple):
    """One answer: its status, its head as it came, its body."""

    status: int
    head: bytes
    body: bytes

    @property
    def retry_after_seconds(self) -> float:
        """How long the server asks to wait; 0 when it does not say."""
        return float(_header(self.head.lower(), b"retry-after") or 0)


def head_of(path: str, host: str, key: str | None) -> bytes:
    """What a POST of JSON begins with, up to the number of bytes in its body."""
    authorization = f"Authorization: Bearer {key}\r\n" if key else ""
    return (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\n{authorization}Content-Type: application/json\r\nContent-Length: "
    ).encode()


def request(head: bytes, body: bytes) -> bytes:
    """A whole request out of what `head_of` gave."""
    return b"%s%d\r\n\r\n%s" % (head, len(body), body)


class Answers:
    """The answers on one kept-alive connection that has one question under way at a time."""

    def __init__(self) -> None:
        self._waiting = b""

    def feed(self, data: bytes) -> Answer | None:
        """Take in bytes; the answer once it is whole."""
        data = self._waiting + data if self._waiting else data
        self._waiting = data
        end = data.find(b"\r\n\r\n")
        if end < 0:
            return None
        if not data.startswith(b"HTTP/1."):
            raise BrokenAnswer(f"it begins with {data[:20]!r}")
        head = data[:end]
        status = int(head[9:12])
        if status == 100:  # to be followed by the answer itself
            self._waiting = b""
            return self.feed(data[end + 4 :])
        body = _body(head.lower(), data[end + 4 :], status)
        if body is None:
            return None
        self._waiting = b""
        return Answer(status, head, body)


def _body(head: bytes, data: bytes, status: int) -> bytes | None:
    length = _header(head, b"content-length")
    if length is not None:
        if len(data) < int(length):
            return None
        if len(data) > int(length):
            raise BrokenAnswer("it is longer than its Content-Length says")
        return data
    if _header(head, b"transfer-encoding") == b"chunked":
        return _chunks(data)
    if status in (204, 304):
        return b""
    raise BrokenAnswer("it says neither how long it is nor that it comes in chunks")


def _chunks(data: bytes) -> bytes | None:
    body, at = b"", 0
    while True:
        line_end = data.find(b"\r\n", at)
        if line_end < 0:
            return None
        size = int(data[at:line_end].partition(b";")[0], 16)
        begin = line_end + 2
        if len(data) < begin + size + 2:
            return None
        if size == 0:
            return body
        body += data[begin : begin + size]
        at = begin + size + 2


def _header(lower_head: bytes, name: bytes) -> bytes | None:
    begin = lower_head.find(b"\r\n" + name + b":")
    if begin < 0:
        return None
    begin += len(name) + 3
    end = lower_head.find(b"\r\n", begin)
    return lower_head[begin : end if end >= 0 else None].strip()
