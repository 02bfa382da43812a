"""What stands in a record: the scalars of one event, read from its protocol buffer. Pure.

Sources: tensorboard/compat/proto/{event,summary,tensor}.proto. Scalars come as `simple_value`, as TensorFlow 1 and
PyTorch write them, and as tensors of one number, as TensorFlow 2 and Keras do. All else is passed over.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
NUMBERS = {1: "<f", 2: "<d", 3: "<i", 4: "<B", 5: "<h", 6: "<b", 9: "<q", 17: "<H", 19: "<e", 22: "<I", 23: "<Q"}
"""The types of tensors that hold numbers, as DataType counts them, and how `struct` calls them."""
FLOATS = {5: "<f", 6: "<d"}
"""The fields of a tensor that hold its numbers one by one, and their form."""
INTEGERS = (7, 10)
"""The same for integers, which are varints."""


class Scalar(NamedTuple):
    """One number that was logged; `wall_time` is in seconds since 1970, as the writer's clock had it."""

    tag: str
    step: int
    value: float
    wall_time: float


class MalformedEvent(ValueError):
    """A record holds no event."""


def scalars_in(record: bytes) -> list[Scalar]:
    """The scalars of an event, in their order. Raises MalformedEvent."""
    wall_time, step = 0.0, 0
    found: list[tuple[str, float]] = []
    for field, kind, value in _fields(record):
        if field == 1 and kind == FIXED64:
            (wall_time,) = struct.unpack("<d", value)
        elif field == 2 and kind == VARINT:
            step = _signed(value)
        elif field == 5 and kind == BYTES:
            found += [read for read in map(_value, _repeated(value, 1)) if read is not None]
    return [Scalar(tag, step, number, wall_time) for tag, number in found]


def _value(summary: bytes) -> tuple[str, float] | None:
    tag: str | None = None
    number: float | None = None
    plugin = "scalars"
    for field, kind, value in _fields(summary):
        if field == 1 and kind == BYTES:
            tag = _text(value)
        elif field == 2 and kind == FIXED32:
            (number,) = struct.unpack("<f", value)
        elif field == 8 and kind == BYTES:
            number = _number(value)
        elif field == 9 and kind == BYTES:
            plugin = _plugin(value)
    return (tag, number) if tag and number is not None and plugin == "scalars" else None


def _plugin(metadata: bytes) -> str:
    for data in _repeated(metadata, 1):
        for name in _repeated(data, 1):
            return _text(name) or ""
    return "scalars"


def _number(tensor: bytes) -> float | None:
    """The number of a tensor that holds exactly one."""
    dtype, content = 0, b""
    numbers: list[float] = []
    for field, kind, value in _fields(tensor):
        if field == 1 and kind == VARINT:
            dtype = value
        elif field == 2 and kind == BYTES:
            for size in (n for dim in _repeated(value, 2) for f, k, n in _fields(dim) if (f, k) == (1, VARINT)):
                if size != 1:
                    return None
        elif field == 4 and kind == BYTES:
            content = value
        elif field in FLOATS and kind != VARINT:  # one, or many packed
            if len(value) % struct.calcsize(FLOATS[field]):
                raise MalformedEvent("a tensor's numbers are torn")
            numbers += [number for (number,) in struct.iter_unpack(FLOATS[field], value)]
        elif field in INTEGERS and kind in (VARINT, BYTES):
            numbers += [_signed(one) for one in ([value] if kind == VARINT else _varints(value))]
    form = NUMBERS.get(dtype)
    if form is None:
        return None
    if len(content) == struct.calcsize(form):
        (number,) = struct.unpack(form, content)
        return float(number)
    return float(numbers[0]) if len(numbers) == 1 and not content else None


def _fields(message: bytes) -> Iterator[tuple[int, int, Any]]:
    """The fields of a message as (number, kind, value): an int for a varint, the bytes for all else."""
    place, end = 0, len(message)
    while place < end:
        key, place = _varint(message, place)
        kind = key & 7
        if kind == VARINT:
            value, place = _varint(message, place)
            yield key >> 3, kind, value
            continue
        if kind == BYTES:
            length, place = _varint(message, place)
        elif kind in (FIXED32, FIXED64):
            length = 4 if kind == FIXED32 else 8
        else:
            raise MalformedEvent(f"a field is of the kind {kind}, which there is not")
        if length > end - place:
            raise MalformedEvent("a field is longer than what holds it")
        yield key >> 3, kind, message[place : place + length]
        place += length


def _repeated(message: bytes, number: int) -> Iterator[bytes]:
    return (value for field, kind, value in _fields(message) if field == number and kind == BYTES)


def _varint(message: bytes, place: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if place >= len(message):
            break
        byte = message[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & (1 << 64) - 1, place
    raise MalformedEvent("a number does not end")


def _varints(packed: bytes) -> Iterator[int]:
    place = 0
    while place < len(packed):
        value, place = _varint(packed, place)
        yield value


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _text(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None
