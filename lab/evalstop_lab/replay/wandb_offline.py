"""W&B's offline runs: the history in a file `run-*.wandb`, read without W&B and without a network.

The file is a log of blocks as LevelDB writes it, behind a header of seven bytes; each record is a protobuf message
`Record` of W&B's `wandb_internal.proto`. Only what is needed of it is read: the items of the history, the name of the
run and `gpus` of its config. The checksum of each block is looked at. A file that breaks off, as that of a run that was
killed does, is read up to there.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from evalstop_lab.errors import UnreadableInput
from evalstop_lab.replay.cells import add_row, number_of, step_of
from evalstop_lab.replay.runs import Roles, Runs, Troubles

BLOCK = 32 * 1024
_HEADER = struct.Struct("<IHB")  # checksum, length, kind
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4

# Numbers of fields in wandb_internal.proto.
_HISTORY, _RUN = 2, 17  # of Record
_ITEM, _STEP = 1, 2  # of HistoryRecord
_NUM = 1  # of HistoryStep
_KEY, _NESTED_KEY, _VALUE_JSON = 1, 2, 16  # of HistoryItem and ConfigItem
_RUN_ID, _CONFIG, _DISPLAY_NAME = 1, 4, 8  # of RunRecord
_UPDATE = 1  # of ConfigRecord


def metrics(path: Path, troubles: Troubles) -> set[str]:
    """The keys of the history."""
    _history.cache_clear()
    found, broken = _history(path)
    if broken is not None:
        troubles.add(broken)
    return {key for row in found["rows"] for key in row}


def read(path: Path, name: str, runs: Runs, roles: Roles, troubles: Troubles) -> None:
    """Take in the history of one run, called by its name and id in W&B."""
    found, broken = _history(path)
    run = runs.run(found["name"] or name, roles)
    run.gpus = found["gpus"]
    reached: object = None
    for index, row in enumerate(found["rows"]):
        try:
            reached = row.get(roles.step, reached)
            if reached is not None:
                add_row(run, step_of(reached), {**row, "gpus": None}, number_of)
        except ValueError as error:
            troubles.add(UnreadableInput(path, f"row {index} of the history: {error}"))
    if broken is not None:
        troubles.add(broken)


@lru_cache(maxsize=1)  # a log is looked at twice: for its metrics, anew, and for their values
def _history(path: Path) -> tuple[dict[str, Any], UnreadableInput | None]:
    found: dict[str, Any] = {"rows": [], "name": None, "gpus": None}
    try:
        data = path.read_bytes()
        for record in _records(data):
            for number, value in _fields(record):
                if number == _HISTORY:
                    found["rows"].append(_row(value))
                elif number == _RUN:
                    _take_run(value, found)
    except OSError as error:
        return found, UnreadableInput(path, f"{error.strerror}; give a file that can be read")
    except ValueError as error:
        return found, UnreadableInput(path, f"{error}; {len(found['rows'])} rows of the history before it were read")
    return found, None


def _records(data: bytes) -> Iterator[bytes]:
    if data[:4] != b":W&B" or len(data) < 7:
        raise ValueError("this is no offline run of W&B: it does not begin with `:W&B`")
    at, parts = 7, b""
    while at < len(data):
        left = BLOCK - at % BLOCK
        if left < _HEADER.size:
            at += left  # the end of a block is padded
            continue
        if len(data) - at < _HEADER.size:
            raise ValueError(f"the file breaks off at byte {at:,}")
        checksum, length, kind = _HEADER.unpack_from(data, at)
        body = data[at + _HEADER.size : at + _HEADER.size + length]
        if len(body) < length:
            raise ValueError(f"the file breaks off at byte {at:,}")
        if not _WHOLE <= kind <= _LAST or zlib.crc32(body, zlib.crc32(bytes([kind]))) != checksum:
            raise ValueError(f"the record at byte {at:,} is broken")
        at += _HEADER.size + length
        parts = body if kind in (_WHOLE, _FIRST) else parts + body
        if kind in (_WHOLE, _LAST):
            yield parts


def _row(record: bytes) -> dict[str, Any]:
    row: dict[str, Any] = {}
    step = 0
    for number, value in _fields(record):
        if number == _ITEM:
            key, cell = _item(value)
            if isinstance(cell, int | float | str):
                row[key] = cell
        elif number == _STEP:
            step = next((num for field, num in _fields(value) if field == _NUM), 0)
    return {"_step": step} | row


def _item(record: bytes) -> tuple[str, object]:
    """Key and value; the parts of a nested key are joined by dots, as W&B shows them."""
    keys, text = [], b"null"
    for number, value in _fields(record):
        if number in (_KEY, _NESTED_KEY):
            keys.append(value.decode("utf-8"))
        elif number == _VALUE_JSON:
            text = value
    return ".".join(keys), json.loads(text)


def _take_run(record: bytes, found: dict[str, Any]) -> None:
    names = {number: value for number, value in _fields(record) if number in (_RUN_ID, _DISPLAY_NAME)}
    said = [names[number].decode("utf-8") for number in (_DISPLAY_NAME, _RUN_ID) if names.get(number)]
    found["name"] = f"{said[0]} ({said[1]})" if len(said) == 2 else said[0] if said else None
    for number, config in _fields(record):
        for field, update in _fields(config) if number == _CONFIG else ():
            if field == _UPDATE:
                key, value = _item(update)
                if key == "gpus" and isinstance(value, int | float) and not isinstance(value, bool) and value >= 0:
                    found["gpus"] = float(value)


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Number and value of each field of a protobuf message: bytes, or a whole number of a varint."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            value, at = _varint(message, at)
            yield number, value
            continue
        if wire == 2:
            length, at = _varint(message, at)
        elif wire in (1, 5):
            length = 8 if wire == 1 else 4
        else:
            raise ValueError(f"a protobuf message has wire type {wire}")
        if at + length > len(message):
            raise ValueError("a protobuf message breaks off")
        yield number, message[at : at + length]
        at += length


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(message) and shift < 64:
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
        shift += 7
    raise ValueError("a protobuf message breaks off")
