"""Follows event files as they grow: the new data in a folder of runs since the last poll.

A folder that holds event files is a run. A restarted trainer writes a new file next to the old one: values logged again
from an earlier step on supersede the old ones, as in TensorBoard.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evalstop_client.tensorboard.event_file import DamagedRecord, MalformedMessage, Reader, Scalar, parse_scalars

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
