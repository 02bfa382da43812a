"""W&B's offline runs: the history in a file `run-*.wandb`, read without W&B and without a network.

The file is a log of blocks as LevelDB writes it, behind a header of seven bytes; each record is a protobuf message
`Record` of W&B's `wandb_internal.proto`. Only what is needed of it is read: the items of the history, the name of the
run, and of its config `gpus` and the planned length. The checksum of each block is looked at. A file that breaks off,
as that of a run that was killed does, is read up to there.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from evalstop_client.tensorboard.protobuf import BYTES, VARINT, fields, repeated
from evalstop_detectors import find_total_steps
from evalstop_detectors.roles import planned_length

from evalstop_lab.errors import UnreadableInput
from evalstop_lab.replay.cells import MOST_GPUS, TOTAL_STEPS, add_row, number_of, step_of
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
    run.total_steps = find_total_steps(found["params"]) or run.total_steps
    reached: object = None
    for index, row in enumerate(found["rows"]):
        try:
            reached = row.get(roles.step, reached)
            if reached is not None:
                add_row(run, step_of(reached), {**row, "gpus": None, TOTAL_STEPS: None}, number_of)
        except ValueError as error:
            troubles.add(UnreadableInput(path, f"row {index} of the history: {error}"))
    if broken is not None:
        troubles.add(broken)


@lru_cache(maxsize=1)  # a log is looked at twice: for its metrics, anew, and for their values
def _history(path: Path) -> tuple[dict[str, Any], UnreadableInput | None]:
    found: dict[str, Any] = {"rows": [], "name": None, "gpus": None, "params": {}}
    try:
        data = path.read_bytes()
        for record in _records(data):
            found["rows"] += map(_row, repeated(record, _HISTORY))
            for run in repeated(record, _RUN):
                _take_run(run, found)
    except OSError as error:
        return found, UnreadableInput(path, f"{error.strerror}; give a file that can be read")
    except ValueError as error:
        return found, UnreadableInput(path, f"{error}; {len(found['rows'])} rows of the history before it were read")
    return found, None


def _records(data: bytes) -> Iterator[bytes]:
    if data[:4] != b":W&B" or len(data) < 7:
        raise ValueError("this is no offline run of W&B: it does not begin with `:W&B`")
    at, begun = 7, False
    parts = bytearray()
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
        if begun == (kind in (_WHOLE, _FIRST)):
            raise ValueError(f"the record at byte {at:,} is torn: a part of it is missing")
        at += _HEADER.size + length
        parts += body
        begun = kind in (_FIRST, _MIDDLE)
        if not begun:
            yield bytes(parts)
            parts.clear()
    if begun:
        raise ValueError(f"the file breaks off at byte {at:,}")


def _row(record: bytes) -> dict[str, Any]:
    row: dict[str, Any] = {}
    step = 0
    for item in repeated(record, _ITEM):
        key, cell = _item(item)
        if isinstance(cell, int | float | str):
            row[key] = cell
    for said in repeated(record, _STEP):
        step = next((value for number, kind, value in fields(said) if (number, kind) == (_NUM, VARINT)), 0)
    return {"_step": step} | row


def _item(record: bytes) -> tuple[str, object]:
    """Key and value; the parts of a nested key are joined by dots, as W&B shows them."""
    keys, text = [], b"null"
    for number, kind, value in fields(record):
        if kind == BYTES and number in (_KEY, _NESTED_KEY):
            keys.append(value.decode("utf-8"))
        elif kind == BYTES and number == _VALUE_JSON:
            text = value
    try:
        return ".".join(keys), json.loads(text)
    except RecursionError as error:
        raise ValueError(f"the value of {'.'.join(keys)[:60]!r} is nested too deep") from error


def _take_run(record: bytes, found: dict[str, Any]) -> None:
    names = [name for number in (_DISPLAY_NAME, _RUN_ID) for name in [*repeated(record, number)][-1:]]
    said = [name.decode("utf-8") for name in names if name]
    found["name"] = f"{said[0]} ({said[1]})" if len(said) == 2 else said[0] if said else None
    for config in repeated(record, _CONFIG):
        for key, value in map(_item, repeated(config, _UPDATE)):
            if key in planned_length.NAMES:
                found["params"][key] = str(value)
            if key == "gpus" and isinstance(value, int | float) and not isinstance(value, bool):
                found["gpus"] = float(value) if 0 <= value <= MOST_GPUS else None
