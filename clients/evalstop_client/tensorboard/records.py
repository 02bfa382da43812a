"""The framing of event files: TFRecords, whose lengths and contents have checksums. Pure.

    length (8 bytes, little endian) | checksum of the length (4) | content | checksum of the content (4)

A checksum is CRC-32C (Castagnoli), rotated and offset: https://www.tensorflow.org/tutorials/load_data/tfrecord.
A file that is being written may end within a record, which is then not returned yet.
"""

from __future__ import annotations

from typing import BinaryIO

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
