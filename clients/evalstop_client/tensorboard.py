"""Reads TensorBoard's event files: their scalars, and what is new in a folder of runs since the last poll.

Sources: https://www.tensorflow.org/tutorials/load_data/tfrecord, https://protobuf.dev/programming-guides/encoding,
tensorboard/compat/proto/{event,summary,tensor}.proto. A record is

    length (8 bytes, little endian) | checksum of the length (4) | content | checksum of the content (4)

with checksums by CRC-32C (Castagnoli), rotated and offset. A file that is being written may end within a record, which
is then not returned yet. Scalars come as `simple_value`, as TensorFlow 1 and PyTorch write them, and as tensors of one
number, as TensorFlow 2 and Keras do. All else is ignored.

A folder that holds event files is a run. A restarted trainer writes a new file next to the old one: values logged again
from an earlier step on supersede the old ones, as in TensorBoard.
"""

from __future__ import annotations

import logging
import os
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
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
        if len(header) < HEADER_BYTES or not any(header):
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
        is_intact = masked_crc32c(content) == int.from_bytes(checksum, "little")
        if not is_intact and not any(checksum[-1:] + self._file.read(HEADER_BYTES)):
            return None  # zeros from somewhere in the record on, as NFS shows before the data arrives
        self.offset = end
        if not is_intact:
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
    for key, kind, value in fields(record):
        if key == 1 and kind == FIXED64:
            (wall_time,) = struct.unpack("<d", value)
        elif key == 2 and kind == VARINT:
            step = signed(value)
        elif key == 5 and kind == BYTES:
            scalars += [read for read in map(_parse_value, repeated(value, 1)) if read is not None]
    return [Scalar(tag, step, number, wall_time) for tag, number in scalars]


def _parse_value(summary: bytes) -> tuple[str, float] | None:
    tag: str | None = None
    number: float | None = None
    plugin = "scalars"
    for key, kind, value in fields(summary):
        if key == 1 and kind == BYTES:
            tag = _decode_text(value)
        elif key == 2 and kind == FIXED32:
            (number,) = struct.unpack("<f", value)
        elif key == 8 and kind == BYTES:
            number = _parse_number(value)
        elif key == 9 and kind == BYTES:
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
    for key, kind, value in fields(tensor):
        if key == 1 and kind == VARINT:
            dtype = value
        elif key == 2 and kind == BYTES:
            for size in (n for dim in repeated(value, 2) for f, k, n in fields(dim) if (f, k) == (1, VARINT)):
                if size != 1:
                    return None
        elif key == 4 and kind == BYTES:
            content = value
        elif key in FLOATS and kind != VARINT:  # one, or many packed
            if len(value) % struct.calcsize(FLOATS[key]):
                raise MalformedMessage("a tensor's numbers are truncated")
            numbers += [number for (number,) in struct.iter_unpack(FLOATS[key], value)]
        elif key in INTEGERS and kind in (VARINT, BYTES):
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


logger = logging.getLogger("evalstop_client.tensorboard")

EVENTS = "events.out.tfevents"
MAX_SCALARS = 1000
HEAD_BYTES = 32
"""This many bytes identify a file: the first record holds the time at which it was created."""


@dataclass
class Position:
    """How far a file was read, and its first bytes: if these change, it is another file."""

    head: bytes = b""
    offset: int = 0


@dataclass
class Portion:
    """Some scalars of one file, in order, and the position after them.

    `restarts_at` is the step from which they supersede earlier values; None if they continue.
    """

    scalars: list[Scalar]
    position: Position
    restarts_at: int | None = None


@dataclass
class Folder:
    """The state of one run's folder: the position in each file, and the last step of each tag with its file."""

    positions: dict[str, Position] = field(default_factory=dict)
    lasts: dict[str, tuple[int, str]] = field(default_factory=dict)
    _complained: set[str] = field(default_factory=set)

    def portion(self, file: Path) -> Portion | None:
        """The next new scalars in `file`, at most `MAX_SCALARS`; None if there are none. Does not advance."""
        position = self.positions.get(file.name)
        try:
            # A pipe would block, and a link could point anywhere.
            descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        except OSError as error:
            self._log_problem(file, str(error))
            return None
        with os.fdopen(descriptor, "rb") as opened:
            file_status = os.fstat(descriptor)
            if not stat.S_ISREG(file_status.st_mode):
                return None
            head = opened.read(HEAD_BYTES)
            is_rewritten = position is not None and not head.startswith(position.head)
            goes_on = position is not None and not is_rewritten and position.offset <= file_status.st_size
            began = position.offset if position is not None and goes_on else 0
            portion = self._read_portion(file, Reader(opened, file_status.st_size, began), is_rewritten)
            portion.position.head = head[: portion.position.offset]
            return portion if portion.position.offset > began else None

    def take(self, file: Path, portion: Portion) -> None:
        self.positions[file.name] = portion.position
        if portion.restarts_at is not None:
            self.lasts = {tag: last for tag, last in self.lasts.items() if last[0] < portion.restarts_at}
        for scalar in portion.scalars:
            step = max(scalar.step, self.lasts.get(scalar.tag, (0, ""))[0])
            self.lasts[scalar.tag] = (step, file.name)

    def _read_portion(self, file: Path, reader: Reader, is_rewritten: bool) -> Portion:
        portion = Portion([], Position())
        while len(portion.scalars) < MAX_SCALARS:
            before = reader.offset
            try:
                record = reader.next()
                scalars = parse_scalars(record) if record else []
            except (DamagedRecord, MalformedMessage) as error:
                self._log_problem(file, f"{error}; it is skipped")
                if reader.offset == before:
                    break
                scalars = []
            else:
                if record is None:
                    break
            restart = min(
                (scalar.step for scalar in scalars if self._is_restart(scalar, file, is_rewritten)), default=None
            )
            if restart is not None and portion.restarts_at is None:
                if portion.scalars:
                    break  # a restart begins a new portion
                portion.restarts_at = restart
            portion.scalars += scalars
            portion.position.offset = reader.offset
        return portion

    def _is_restart(self, scalar: Scalar, file: Path, is_rewritten: bool) -> bool:
        last = self.lasts.get(scalar.tag)
        return last is not None and (is_rewritten or last[1] != file.name) and scalar.step <= last[0]

    def _log_problem(self, file: Path, message: str) -> None:
        if file.name not in self._complained:
            self._complained.add(file.name)
            logger.warning("%s: %s (logged once)", file, message)

    def document(self) -> dict[str, Any]:
        positions = {name: [position.head.hex(), position.offset] for name, position in self.positions.items()}
        return {"positions": positions, "lasts": self.lasts}

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> Folder:
        """The folder that `document` describes. Raises KeyError, TypeError or ValueError."""
        positions = {
            str(name): Position(bytes.fromhex(at[0]), int(at[1])) for name, at in document["positions"].items()
        }
        lasts = {str(tag): (int(last[0]), str(last[1])) for tag, last in document["lasts"].items()}
        return cls(positions, lasts)


def find_event_files(root: Path) -> Iterator[tuple[Path, list[Path]]]:
    """Each folder at and below `root` with event files, oldest first; links are not followed."""
    for folder, folders, names in os.walk(root):
        folders.sort()
        files = sorted(Path(folder) / name for name in names if name.startswith(EVENTS))
        if files:
            yield Path(folder), files


def read_all_scalars(files: list[Path]) -> Iterator[Portion]:
    """All scalars in the event files of one folder, portion by portion."""
    folder = Folder()
    for file in files:
        while (portion := folder.portion(file)) is not None:
            folder.take(file, portion)
            yield portion
