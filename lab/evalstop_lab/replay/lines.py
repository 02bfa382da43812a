"""Reads the numbered lines of a file, with a progress bar if the file is long."""

from __future__ import annotations

import io
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import BinaryIO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from evalstop_lab.errors import UnreadableInput
from evalstop_lab.replay.runs import Troubles

LONGEST_LINE = 1 << 20
STANDARD_INPUT = Path("-")
_LONG_FILE = 16 << 20
_LINES_BETWEEN_UPDATES = 10_000


def lines(path: Path, troubles: Troubles | None = None) -> Iterator[tuple[int, str]]:
    """Yield each nonblank line with its number, from 1; invalid text is reported to `troubles`."""
    troubles = troubles or Troubles()
    try:
        with nullcontext(_standard_input()) if path == STANDARD_INPUT else path.open("rb") as file:
            size = 0 if path == STANDARD_INPUT else path.stat().st_size
            for number, line in _with_progress(file, path, size):
                if len(line) > LONGEST_LINE:
                    words = f"the line is longer than {LONGEST_LINE:,} bytes; one row a line"
                    troubles.add(UnreadableInput(path, words, number))
                    return  # a file without line ends is not text
                if line.isspace():
                    continue
                try:
                    yield number, _text(path, number, line)
                except UnreadableInput as error:
                    troubles.add(error)
    except OSError as error:
        troubles.add(UnreadableInput(path, f"{error.strerror}; give a file that can be read"))


class NumberedLines:
    """The lines of a file for a reader that counts rows; `number` is that of the last line read."""

    def __init__(self, path: Path, troubles: Troubles | None = None) -> None:
        self.number = 0
        self._lines = lines(path, troubles)

    def __iter__(self) -> Iterator[str]:
        for number, line in self._lines:
            self.number = number
            yield line


def _standard_input() -> BinaryIO:
    """Standard input from its beginning; a pipe is copied to disk first."""
    if not sys.stdin.seekable():
        kept = tempfile.TemporaryFile()  # noqa: SIM115 - it is closed with the process
        shutil.copyfileobj(sys.stdin.buffer, kept)
        sys.stdin = io.TextIOWrapper(kept)
    sys.stdin.buffer.seek(0)
    return sys.stdin.buffer


def _with_progress(file: BinaryIO, path: Path, size: int) -> Iterator[tuple[int, bytes]]:
    numbered = enumerate(iter(lambda: file.readline(LONGEST_LINE + 1), b""), start=1)
    if size < _LONG_FILE:
        yield from numbered
        return
    columns = (TextColumn("reading {task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(path.name, total=size)
        for number, line in numbered:
            yield number, line
            if number % _LINES_BETWEEN_UPDATES == 0:
                progress.update(task, completed=file.tell())


def _text(path: Path, number: int, line: bytes) -> str:
    try:
        text = line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise UnreadableInput(path, f"byte {error.start + 1} is no UTF-8; give a text file in UTF-8", number) from error
    if "\0" in text:
        raise UnreadableInput(path, "it holds NUL bytes; give a text file in UTF-8", number)
    return text
