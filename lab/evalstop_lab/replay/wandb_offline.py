"""Reads W&B's offline runs, files `run-*.wandb`, without W&B and without a network.

After a header of seven bytes the file has the format of LevelDB's log; each record is a protobuf message `Record` of
W&B's `wandb_internal.proto`. The reader decodes only the history, the name of the run, and `gpus` and the planned
length from its config, and verifies checksums. A truncated file, such as that of a killed run, is read up to its end.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from evalstop_client.tensorboard import BYTES, VARINT, fields, repeated
from evalstop_detectors import find_total_steps
from evalstop_detectors.roles.params import BEST_METRIC, GREATER_IS_BETTER, LENGTH_NAMES

from evalstop_lab.errors import UnreadableInput
from evalstop_lab.replay.rows import TOTAL_STEPS, LoggedRun, parse_gpus
from evalstop_lab.replay.runs import ReadErrors

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


def parse_offline_run(path: Path) -> LoggedRun:
    """Read the history of one run, which is named by its name and id in W&B; settings of its config tell which metric
    counts."""
    history: dict[str, Any] = {"rows": [], "name": None, "gpus": None, "params": {}}
    errors: ReadErrors = []
    try:
        for record in _parse_records(path.read_bytes()):
            history["rows"] += map(_parse_row, repeated(record, _HISTORY))
            for run in repeated(record, _RUN):
                _read_run(run, history)
    except OSError as error:
        errors.append(UnreadableInput(path, f"{error.strerror}; give a readable file"))
    except ValueError as error:
        errors.append(UnreadableInput(path, f"{error}; the {len(history['rows'])} rows before it were read"))
    if not history["rows"]:
        raise errors[0] if errors else UnreadableInput(path, "no metrics were logged")
    # A metric may be named like a column of ours.
    rows = [
        (f"row {index} of the history", None, {**row, "gpus": None, TOTAL_STEPS: None})
        for index, row in enumerate(history["rows"])
    ]
    return LoggedRun(
        rows,
        errors,
        tags=history["params"],
        name=history["name"],
        gpus=history["gpus"],
        total_steps=find_total_steps(history["params"]),
    )


def _parse_records(data: bytes) -> Iterator[bytes]:
    if data and (data[:4] != b":W&B" or len(data) < 7):  # without data it ended before anything was written
        raise ValueError("it is not an offline run of W&B: it does not start with `:W&B`")
    at, is_incomplete = 7, False
    parts = bytearray()
    while at < len(data):
        block_bytes_left = BLOCK - at % BLOCK
        if block_bytes_left < _HEADER.size:
            at += block_bytes_left  # the end of a block is padded
            continue
        if len(data) - at < _HEADER.size:
            raise ValueError(f"the file is truncated at byte {at:,}")
        checksum, length, kind = _HEADER.unpack_from(data, at)
        body = data[at + _HEADER.size : at + _HEADER.size + length]
        if len(body) < length:
            raise ValueError(f"the file is truncated at byte {at:,}")
        if not _WHOLE <= kind <= _LAST or zlib.crc32(body, zlib.crc32(bytes([kind]))) != checksum:
            raise ValueError(f"the record at byte {at:,} is corrupt")
        if is_incomplete == (kind in (_WHOLE, _FIRST)):
            raise ValueError(f"a part of the record at byte {at:,} is missing")
        at += _HEADER.size + length
        parts += body
        is_incomplete = kind in (_FIRST, _MIDDLE)
        if not is_incomplete:
            yield bytes(parts)
            parts.clear()
    if is_incomplete:
        raise ValueError(f"the file is truncated at byte {at:,}")


def _parse_row(record: bytes) -> dict[str, Any]:
    row: dict[str, Any] = {}
    step = 0
    for item in repeated(record, _ITEM):
        key, cell = _parse_item(item)
        if isinstance(cell, int | float | str):
            row[key] = cell
    for message in repeated(record, _STEP):
        step = next((value for number, kind, value in fields(message) if (number, kind) == (_NUM, VARINT)), 0)
    return {"_step": step} | row


def _parse_item(record: bytes) -> tuple[str, object]:
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
        raise ValueError(f"the value of {'.'.join(keys)[:60]!r} is nested too deeply") from error


def _read_run(record: bytes, history: dict[str, Any]) -> None:
    names = [name for number in (_DISPLAY_NAME, _RUN_ID) for name in [*repeated(record, number)][-1:]]
    parts = [name.decode("utf-8") for name in names if name]
    history["name"] = f"{parts[0]} ({parts[1]})" if len(parts) == 2 else parts[0] if parts else None
    for config in repeated(record, _CONFIG):
        for key, value in map(_parse_item, repeated(config, _UPDATE)):
            if key in (*LENGTH_NAMES, BEST_METRIC, GREATER_IS_BETTER):
                history["params"][key] = str(value)
            if key == "gpus":
                history["gpus"] = parse_gpus(value)
