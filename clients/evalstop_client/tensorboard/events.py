"""Parses the scalars of one record from its protocol buffer. Pure.

Sources: tensorboard/compat/proto/{event,summary,tensor}.proto. Scalars come as `simple_value`, as TensorFlow 1 and
PyTorch write them, and as tensors of one number, as TensorFlow 2 and Keras do. All else is ignored.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from evalstop_client.tensorboard.protobuf import (
    BYTES,
    FIXED32,
    FIXED64,
    VARINT,
    MalformedMessage,
    fields,
    repeated,
    signed,
    varints,
)

NUMBERS = {1: "<f", 2: "<d", 3: "<i", 4: "<B", 5: "<h", 6: "<b", 9: "<q", 17: "<H", 19: "<e", 22: "<I", 23: "<Q"}
"""Numeric tensor types: the numbers of DataType and the formats of `struct`."""
FLOATS = {5: "<f", 6: "<d"}
"""The fields of a tensor that hold repeated numbers, and their formats."""
INTEGERS = (7, 10)
"""The same for integers, which are varints."""


class Scalar(NamedTuple):
    """One logged number; `wall_time` in seconds since 1970, by the writer's clock."""

    tag: str
    step: int
    value: float
    wall_time: float


def parse_scalars(record: bytes) -> list[Scalar]:
    """The scalars of an event, in order. Raises MalformedMessage."""
    wall_time, step = 0.0, 0
    scalars: list[tuple[str, float]] = []
    for field, kind, value in fields(record):
        if field == 1 and kind == FIXED64:
            (wall_time,) = struct.unpack("<d", value)
        elif field == 2 and kind == VARINT:
            step = signed(value)
        elif field == 5 and kind == BYTES:
            scalars += [read for read in map(_parse_value, repeated(value, 1)) if read is not None]
    return [Scalar(tag, step, number, wall_time) for tag, number in scalars]


def _parse_value(summary: bytes) -> tuple[str, float] | None:
    tag: str | None = None
    number: float | None = None
    plugin = "scalars"
    for field, kind, value in fields(summary):
        if field == 1 and kind == BYTES:
            tag = _decode_text(value)
        elif field == 2 and kind == FIXED32:
            (number,) = struct.unpack("<f", value)
        elif field == 8 and kind == BYTES:
            number = _parse_number(value)
        elif field == 9 and kind == BYTES:
            plugin = _parse_plugin(value)
    return (tag, number) if tag and number is not None and plugin == "scalars" else None


def _parse_plugin(metadata: bytes) -> str:
    for data in repeated(metadata, 1):
        for name in repeated(data, 1):
            return _decode_text(name) or ""
    return "scalars"


def _parse_number(tensor: bytes) -> float | None:
    """The number of a tensor with exactly one."""
    dtype, content = 0, b""
    numbers: list[float] = []
    for field, kind, value in fields(tensor):
        if field == 1 and kind == VARINT:
            dtype = value
        elif field == 2 and kind == BYTES:
            for size in (n for dim in repeated(value, 2) for f, k, n in fields(dim) if (f, k) == (1, VARINT)):
                if size != 1:
                    return None
        elif field == 4 and kind == BYTES:
            content = value
        elif field in FLOATS and kind != VARINT:  # one, or many packed
            if len(value) % struct.calcsize(FLOATS[field]):
                raise MalformedMessage("a tensor's numbers are truncated")
            numbers += [number for (number,) in struct.iter_unpack(FLOATS[field], value)]
        elif field in INTEGERS and kind in (VARINT, BYTES):
            numbers += [signed(encoded) for encoded in ([value] if kind == VARINT else varints(value))]
    form = NUMBERS.get(dtype)
    if form is None:
        return None
    if len(content) == struct.calcsize(form):
        (number,) = struct.unpack(form, content)
        return float(number)
    return float(numbers[0]) if len(numbers) == 1 and not content else None


def _decode_text(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None
