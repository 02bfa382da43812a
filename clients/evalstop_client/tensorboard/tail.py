"""Follows event files as they grow: the new data in a folder of runs since the last poll.

A folder that holds event files is a run. A restarted trainer writes a new file next to the old one: values logged again
from an
earlier step on supersede the old ones, as in TensorBoard.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evalstop_client.tensorboard.events import Scalar, parse_scalars
from evalstop_client.tensorboard.protobuf import MalformedMessage
from evalstop_client.tensorboard.records import DamagedRecord, Reader

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
        known = self.positions.get(file.name)
        try:
            # A pipe would block, and a link could point anywhere.
            descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        except OSError as error:
            self._complain(file, str(error))
            return None
        with os.fdopen(descriptor, "rb") as opened:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                return None
            head = opened.read(HEAD_BYTES)
            anew = known is not None and not head.startswith(known.head)
            goes_on = known is not None and not anew and known.offset <= found.st_size
            began = known.offset if known is not None and goes_on else 0
            portion = self._read(file, Reader(opened, found.st_size, began), anew)
            portion.position.head = head[: portion.position.offset]
            return portion if portion.position.offset > began else None

    def take(self, file: Path, portion: Portion) -> None:
        """Advance past a portion."""
        self.positions[file.name] = portion.position
        if portion.restarts_at is not None:
            self.lasts = {tag: last for tag, last in self.lasts.items() if last[0] < portion.restarts_at}
        for scalar in portion.scalars:
            step = max(scalar.step, self.lasts.get(scalar.tag, (0, ""))[0])
            self.lasts[scalar.tag] = (step, file.name)

    def _read(self, file: Path, reader: Reader, anew: bool) -> Portion:
        portion = Portion([], Position())
        while len(portion.scalars) < MAX_SCALARS:
            before = reader.offset
            try:
                record = reader.next()
                scalars = parse_scalars(record) if record else []
            except (DamagedRecord, MalformedMessage) as error:
                self._complain(file, f"{error}; it is skipped")
                if reader.offset == before:
                    break
                scalars = []
            else:
                if record is None:
                    break
            restart = min((one.step for one in scalars if self._is_restart(one, file, anew)), default=None)
            if restart is not None and portion.restarts_at is None:
                if portion.scalars:
                    break  # a restart begins a new portion
                portion.restarts_at = restart
            portion.scalars += scalars
            portion.position.offset = reader.offset
        return portion

    def _is_restart(self, scalar: Scalar, file: Path, anew: bool) -> bool:
        last = self.lasts.get(scalar.tag)
        return last is not None and (anew or last[1] != file.name) and scalar.step <= last[0]

    def _complain(self, file: Path, what: str) -> None:
        if file.name not in self._complained:
            self._complained.add(file.name)
            logger.warning("%s: %s (logged once)", file, what)

    def document(self) -> dict[str, Any]:
        """The state as JSON."""
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
