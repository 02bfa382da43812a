"""Reads the scalars in TensorBoard's event files: the framing, the wire format of protocol buffers, the messages. Pure.

Sources: https://www.tensorflow.org/tutorials/load_data/tfrecord, https://protobuf.dev/programming-guides/encoding,
tensorboard/compat/proto/{event,summary,tensor}.proto. A record is

    length (8 bytes, little endian) | checksum of the length (4) | content | checksum of the content (4)

with checksums by CRC-32C (Castagnoli), rotated and offset. A file that is being written may end within a record, which
is then not returned yet. Scalars come as `simple_value`, as TensorFlow 1 and PyTorch write them, and as tensors of one
number, as TensorFlow 2 and Keras do. All else is ignored.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

HEADER_BYTES = 12
CHECKSUM_BYTES = 4
LARGEST_RECORD_BYTES = 1 << 20  # images and graphs are larger; scalars are not
LARGEST_LENGTH = 1 << 40


class DamagedRecord(ValueError):
    """A record does not have the checksum that it should have."""


class Reader:
    """The records of an open file from `offset` on; `offset` is the end of the last complete one."""

    def __init__(self, file: BinaryIO, size: int, offset: int = 0) -> None:
        self._file = file
        self._size = size
        self.offset = offset

    def next(self) -> bytes | None:
        """The next record, empty if it is too large to hold scalars, or None if there is none yet.

        Raises DamagedRecord. After damaged content `offset` is the end of the record; after a damaged length that end
        is unknown, and `offset` stays.
        """
        self._file.seek(self.offset)
        header = self._file.read(HEADER_BYTES)
        if len(header) < HEADER_BYTES:
            return None
        length = int.from_bytes(header[:8], "little")
        if masked_crc32c(header[:8]) != int.from_bytes(header[8:], "little") or length > LARGEST_LENGTH:
            raise DamagedRecord(f"the record at byte {self.offset} has a damaged length")
        begin, end = self.offset, self.offset + HEADER_BYTES + length + CHECKSUM_BYTES
        if end > self._size:
            return None
        if length > LARGEST_RECORD_BYTES:
            self.offset = end
            return b""
        content, checksum = self._file.read(length), self._file.read(CHECKSUM_BYTES)
        if len(content) < length or len(checksum) < CHECKSUM_BYTES:
            return None
        self.offset = end
        if masked_crc32c(content) != int.from_bytes(checksum, "little"):
            raise DamagedRecord(f"the record at byte {begin} is damaged")
        return content


def masked_crc32c(data: bytes) -> int:
    """The checksum of `data` in TFRecords."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _entry(index: int) -> int:
    for _ in range(8):
        index = index >> 1 ^ (0x82F63B78 if index & 1 else 0)
    return index


_TABLE = [_entry(index) for index in range(256)]


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
