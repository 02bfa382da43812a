"""Decompresses a body as it arrives, in small chunks: memory use does not depend on its decompressed size."""

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
"""Largest chunk, compressed or decompressed."""

WINDOW_LOG = 23
"""Base-2 logarithm of zstd's largest window, 8 MiB: every decoder must support it, and it bounds the memory."""

MOST_MEMBERS = 10_000
"""Compressed files may be concatenated, including empty ones, and each costs time."""


class DecompressionError(Exception):
    """The body cannot be decompressed."""


class _Member(Protocol):
    """One compressed file, decompressed in chunks of limited size."""

    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int) -> bytes: ...


class Decompressor:
    """Decompresses a body as it arrives; `new_member` begins a compressed file, None: the body is not compressed."""

    def __init__(self, new_member: Callable[[], _Member] | None) -> None:
        self._new_member = new_member
        self._member: _Member | None = None
        self._members = 0

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Decompress the next part; consume the chunks before you pass another one. Raises DecompressionError."""
        for at in range(0, len(data), PIECE_BYTES):
            part = data[at : at + PIECE_BYTES]
            if self._new_member is None:
                yield part
            else:
                yield from self._decompress(part, self._new_member)

    def end(self) -> None:
        """End the body. Raises DecompressionError if it is truncated."""
        if self._member is not None or (self._new_member is not None and not self._members):
            raise DecompressionError("it is truncated")

    def _decompress(self, data: bytes, new_member: Callable[[], _Member]) -> Iterator[bytes]:
        full = False
        while data or full:
            if self._member is None:
                self._members += 1
                if self._members > MOST_MEMBERS:
                    raise DecompressionError(f"it is a concatenation of more than {MOST_MEMBERS} compressed files")
                self._member = new_member()
            member = self._member
            try:
                piece = member.decompress(data, PIECE_BYTES)
            except (zlib.error, zstd.ZstdError) as error:
                raise DecompressionError(_describe_error(error)) from error
            if piece:
                yield piece
            data, full = b"", len(piece) == PIECE_BYTES
            if member.eof:
                data, full, self._member = member.unused_data, False, None


def create_decompressor(encoding: str) -> Decompressor | None:
    """The decompressor for the value of a Content-Encoding header; None if it is unknown."""
    match encoding.strip().lower():
        case "" | "identity":
            return Decompressor(None)
        case "gzip" | "x-gzip":
            return Decompressor(_Gzip)
        case "zstd":
            return Decompressor(_create_zstd)
    return None


class _Gzip:
    """A member of a gzip file; keeps undecompressed input, as zstd's reader does itself."""

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


def _create_zstd() -> _Member:
    return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: WINDOW_LOG})


def _describe_error(error: Exception) -> str:
    if "too much memory" in str(error):
        return f"its window is over {2 ** (WINDOW_LOG - 20)} MiB; compress it without `--long` and `--ultra`"
    return str(error)
