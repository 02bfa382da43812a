"""The lines of a file, numbered, with a progress bar when the file is long."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import BinaryIO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from evalstop_lab.errors import UnreadableInput

LONGEST_LINE = 1 << 20
STANDARD_INPUT = Path("-")
_LONG_FILE = 16 << 20
_LINES_BETWEEN_UPDATES = 10_000


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """Each line that is not blank with its number, from 1; raises UnreadableInput for what is no text."""
    try:
        with nullcontext(sys.stdin.buffer) if path == STANDARD_INPUT else path.open("rb") as file:
            size = 0 if path == STANDARD_INPUT else path.stat().st_size
            for number, line in _with_progress(file, path, size):
                if len(line) > LONGEST_LINE:
                    raise UnreadableInput(
                        path, f"the line is longer than {LONGEST_LINE:,} bytes; one row a line", number
                    )
                if not line.isspace():
                    yield number, _text(path, number, line)
    except OSError as error:
        raise UnreadableInput(path, f"{error.strerror}; give a file that can be read") from error


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
