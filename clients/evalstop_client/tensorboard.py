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
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

HEADER_BYTES = 12
CHECKSUM_BYTES = 4
LARGEST_RECORD_BYTES = 1 << 20  # images and graphs are larger; scalars are not


def read_record(file: BinaryIO, offset: int, size: int) -> tuple[bytes, int] | None:
    """The record at `offset`, empty if it is too large to hold scalars, and its end; None if it is not whole yet.

    A file may have grown before its content arrives, as on NFS. So a wrong checksum means that the record is not whole
    yet; what follows a damaged one is never read, as in TensorBoard.
    """
    file.seek(offset)
    header = file.read(HEADER_BYTES)
    length = int.from_bytes(header[:8], "little")
    end = offset + HEADER_BYTES + length + CHECKSUM_BYTES
    if len(header) < HEADER_BYTES or masked_crc32c(header[:8]) != int.from_bytes(header[8:], "little") or end > size:
        return None
    if length > LARGEST_RECORD_BYTES:
        return b"", end
    content, checksum = file.read(length), file.read(CHECKSUM_BYTES)
    return (content, end) if masked_crc32c(content) == int.from_bytes(checksum, "little") else None


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


def fields(message: bytes) -> Iterator[tuple[int, int, Any]]:
    """The fields of a message as (number, kind, value): an int for a varint, bytes for others.

    Raises ValueError.
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
            raise ValueError(f"a field has the unknown wire type {kind}")
        if length > end - offset:
            raise ValueError("a field is longer than its message")
        yield key >> 3, kind, message[offset : offset + length]
        offset += length


def repeated(message: bytes, number: int) -> Iterator[bytes]:
    """The values of the byte fields with this number."""
    return (value for field, kind, value in fields(message) if field == number and kind == BYTES)


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
    raise ValueError("a number does not end")


FLOATS = {1: "<f", 2: "<d"}
"""The types of tensors that hold scalars, by their numbers in DataType, and their formats: writers cast to these."""
FLOAT_FIELDS = {5: "<f", 6: "<d"}
"""The fields of a tensor that hold repeated numbers, and their formats."""


class Scalar(NamedTuple):
    """One logged number; `wall_time` in seconds since 1970, by the writer's clock."""

    tag: str
    step: int
    value: float
    wall_time: float


def parse_scalars(record: bytes) -> list[Scalar]:
    """The scalars of an event, in order. Raises ValueError."""
    wall_time, step = 0.0, 0
    scalars: list[tuple[str, float]] = []
    for key, kind, value in fields(record):
        if key == 1 and kind == FIXED64:
            (wall_time,) = struct.unpack("<d", value)
        elif key == 2 and kind == VARINT:
            step = value - (1 << 64) if value >= 1 << 63 else value  # of 64 bits, signed
        elif key == 5 and kind == BYTES:
            scalars += [read for read in map(_parse_value, repeated(value, 1)) if read is not None]
    return [Scalar(tag, step, number, wall_time) for tag, number in scalars]


def _parse_value(summary: bytes) -> tuple[str, float] | None:
    tag: str | None = None
    number: float | None = None
    for key, kind, value in fields(summary):
        if key == 1 and kind == BYTES:
            tag = value.decode(errors="replace")
        elif key == 2 and kind == FIXED32:
            (number,) = struct.unpack("<f", value)
        elif key == 8 and kind == BYTES:
            number = _parse_number(value)
    return (tag, number) if tag and number is not None else None


def _parse_number(tensor: bytes) -> float | None:
    """The number of a tensor with exactly one."""
    form = ""
    numbers: list[float] = []
    for key, kind, value in fields(tensor):
        if key == 1 and kind == VARINT:
            form = FLOATS.get(value, "")
        elif key == 2 and kind == BYTES:
            for size in (n for dim in repeated(value, 2) for f, k, n in fields(dim) if (f, k) == (1, VARINT)):
                if size != 1:
                    return None
        elif key == 4 and kind == BYTES and form and len(value) == struct.calcsize(form):
            numbers += struct.unpack(form, value)
        elif key in FLOAT_FIELDS and kind != VARINT and len(value) == struct.calcsize(FLOAT_FIELDS[key]):
            numbers += struct.unpack(FLOAT_FIELDS[key], value)
    return float(numbers[0]) if form and len(numbers) == 1 else None


logger = logging.getLogger("evalstop_client.tensorboard")

EVENTS = "events.out.tfevents"
MAX_SCALARS = 1000


@dataclass
class Portion:
    """Some scalars of one file, in order, and the offset after them.

    `restarts_at` is the step from which they supersede earlier values; None if they continue.
    """

    scalars: list[Scalar]
    end: int
    restarts_at: int | None = None


@dataclass
class Folder:
    """The state of one run's folder: how far each file was read, and the last step of each tag with its file."""

    offsets: dict[str, int] = field(default_factory=dict)
    lasts: dict[str, tuple[int, str]] = field(default_factory=dict)

    def portion(self, file: Path) -> Portion | None:
        """The next new scalars in `file`, at most `MAX_SCALARS`; None if there are none. Does not advance."""
        if not file.is_file() or file.is_symlink():  # a pipe would block, and a link could point anywhere
            return None
        try:
            with file.open("rb") as opened:
                size = os.fstat(opened.fileno()).st_size
                began = self.offsets.get(file.name, 0)
                began = began if began <= size else 0  # a shorter file is another one
                portion = self._read_portion(file.name, opened, began, size)
        except OSError as error:
            logger.warning("%s: %s", file, error)
            return None
        return portion if portion.end > began else None

    def take(self, file: Path, portion: Portion) -> None:
        self.offsets[file.name] = portion.end
        if portion.restarts_at is not None:
            self.lasts = {tag: last for tag, last in self.lasts.items() if last[0] < portion.restarts_at}
        for scalar in portion.scalars:
            step = max(scalar.step, self.lasts.get(scalar.tag, (0, ""))[0])
            self.lasts[scalar.tag] = (step, file.name)

    def _read_portion(self, name: str, opened: BinaryIO, began: int, size: int) -> Portion:
        portion = Portion([], began)
        while len(portion.scalars) < MAX_SCALARS and (record := read_record(opened, portion.end, size)) is not None:
            content, end = record
            try:
                scalars = parse_scalars(content)
            except ValueError as error:
                logger.warning("%s: the record at byte %d is skipped: %s", name, portion.end, error)
                scalars = []
            restart = min((scalar.step for scalar in scalars if self._is_restart(scalar, name)), default=None)
            if restart is not None and portion.restarts_at is None:
                if portion.scalars:
                    break  # a restart begins a new portion
                portion.restarts_at = restart
            portion.scalars += scalars
            portion.end = end
        return portion

    def _is_restart(self, scalar: Scalar, name: str) -> bool:
        last = self.lasts.get(scalar.tag)
        return last is not None and last[1] != name and scalar.step <= last[0]

    def document(self) -> dict[str, Any]:
        return {"offsets": self.offsets, "lasts": self.lasts}

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> Folder:
        """The folder that `document` describes. Raises KeyError, TypeError or ValueError."""
        offsets = {str(name): int(offset) for name, offset in document["offsets"].items()}
        lasts = {str(tag): (int(last[0]), str(last[1])) for tag, last in document["lasts"].items()}
        return cls(offsets, lasts)


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
        if file.is_file() and (end := folder.offsets.get(file.name, 0)) < file.stat().st_size:
            logger.warning("%s: what follows byte %d is damaged, and is not read", file, end)
