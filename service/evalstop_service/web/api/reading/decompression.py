"""A body unpacked while it arrives, a piece at a time: however much is packed into it, little of it is ever held."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterator
from typing import Protocol

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

PIECE_BYTES = 64 * 1024
"""No piece is larger, packed or unpacked."""

WINDOW_LOG = 23
"""The largest window of zstd is 2 to this power, 8 MiB: what every decoder is to support, and no more is set aside."""

MOST_MEMBERS = 10_000
"""Compressed files can be strung together, empty ones too, and each costs time though it holds nothing."""


class Damaged(Exception):
    """The body cannot be unpacked."""


class Unpacker(Protocol):
    """Takes a body in as it arrives and gives what was packed into it."""

    def pieces(self, data: bytes) -> Iterator[bytes]:
        """What comes of the next part of the body, and must be taken before the one after it. Raises Damaged."""
        ...

    def end(self) -> None:
        """The body has ended. Raises Damaged if something is missing."""
        ...


def unpacker(encoding: str) -> Unpacker | None:
    """For the value of a Content-Encoding header; None for one that is not known."""
    match encoding.strip().lower():
        case "" | "identity":
            return _Plain()
        case "gzip" | "x-gzip":
            return _Packed(_Gzip)
        case "zstd":
            return _Packed(_zstd)
    return None


class _Plain:
    def pieces(self, data: bytes) -> Iterator[bytes]:
        yield from _cut(data)

    def end(self) -> None:
        pass


class _Member(Protocol):
    """One compressed file, unpacked up to a limit at a time."""

    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int) -> bytes: ...


class _Packed:
    def __init__(self, member: Callable[[], _Member]) -> None:
        self._new = member
        self._member: _Member | None = None
        self._members = 0

    def pieces(self, data: bytes) -> Iterator[bytes]:
        for part in _cut(data):
            yield from self._pieces(part)

    def end(self) -> None:
        if self._member is not None or not self._members:
            raise Damaged("it ends in the middle")

    def _pieces(self, data: bytes) -> Iterator[bytes]:
        full = False
        while data or full:
            member = self._member or self._begin()
            try:
                piece = member.decompress(data, PIECE_BYTES)
            except (zlib.error, zstd.ZstdError) as error:
                raise Damaged(_words(error)) from error
            if piece:
                yield piece
            data, full = b"", len(piece) == PIECE_BYTES
            if member.eof:
                data, full, self._member = member.unused_data, False, None

    def _begin(self) -> _Member:
        self._members += 1
        if self._members > MOST_MEMBERS:
            raise Damaged(f"it is strung together of more than {MOST_MEMBERS} compressed files")
        self._member = self._new()
        return self._member


class _Gzip:
    """A member of a gzip file; keeps what is still to be unpacked, as the reader of zstd does by itself."""

    def __init__(self) -> None:
        self._reader = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)

    @property
    def eof(self) -> bool:
        return self._reader.eof

    @property
    def unused_data(self) -> bytes:
        return self._reader.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        return self._reader.decompress(self._reader.unconsumed_tail + data, max_length)


def _zstd() -> _Member:
    return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: WINDOW_LOG})


def _cut(data: bytes) -> Iterator[bytes]:
    return (data[at : at + PIECE_BYTES] for at in range(0, len(data), PIECE_BYTES))


def _words(error: Exception) -> str:
    if "too much memory" in str(error):
        return f"its window is over {2 ** (WINDOW_LOG - 20)} MiB; pack it without `--long` and `--ultra`"
    return str(error)
