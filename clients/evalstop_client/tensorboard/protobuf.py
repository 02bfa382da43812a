"""Parses the wire format of protocol buffers: the fields of a message, by number. Pure.

Source: https://protobuf.dev/programming-guides/encoding. Groups, which are deprecated, are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


class MalformedMessage(ValueError):
    """The bytes are not a valid message."""


def fields(message: bytes) -> Iterator[tuple[int, int, Any]]:
    """The fields of a message as (number, kind, value): an int for a varint, bytes for others.

    Raises MalformedMessage.
    """
    offset, end = 0, len(message)
    while offset < end:
        key, offset = _varint(message, offset)
        kind = key & 7
        if kind == VARINT:
            value, offset = _varint(message, offset)
            yield key >> 3, kind, value
            continue
        if kind == BYTES:
            length, offset = _varint(message, offset)
        elif kind in (FIXED32, FIXED64):
            length = 4 if kind == FIXED32 else 8
        else:
            raise MalformedMessage(f"a field has the unknown wire type {kind}")
        if length > end - offset:
            raise MalformedMessage("a field is longer than its message")
        yield key >> 3, kind, message[offset : offset + length]
        offset += length


def repeated(message: bytes, number: int) -> Iterator[bytes]:
    """The values of the byte fields with this number."""
    return (value for field, kind, value in fields(message) if field == number and kind == BYTES)


def varints(packed: bytes) -> Iterator[int]:
    """Consecutive varints."""
    offset = 0
    while offset < len(packed):
        value, offset = _varint(packed, offset)
        yield value


def signed(value: int) -> int:
    """A varint as a signed 64-bit integer."""
    return value - (1 << 64) if value >= 1 << 63 else value


def _varint(message: bytes, offset: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if offset >= len(message):
            break
        byte = message[offset]
        offset += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & (1 << 64) - 1, offset
    raise MalformedMessage("a number does not end")
