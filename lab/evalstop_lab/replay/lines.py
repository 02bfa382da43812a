"""Reads the numbered lines of a file."""

from __future__ import annotations

import io
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import BinaryIO

from evalstop_lab.errors import UnreadableInput
from evalstop_lab.replay.runs import ReadErrors

LONGEST_LINE = 1 << 20
STANDARD_INPUT = Path("-")


def read_lines(path: Path, errors: ReadErrors | None = None) -> Iterator[tuple[int, str]]:
    """Yield each nonblank line with its number, from 1; invalid text is reported to `errors`."""
    errors = errors or ReadErrors()
    try:
        with nullcontext(_rewind_standard_input()) if path == STANDARD_INPUT else path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE + 1), b""), start=1):
                if len(line) > LONGEST_LINE:
                    problem = f"the line is longer than {LONGEST_LINE:,} bytes; write one row per line"
                    errors.add(UnreadableInput(path, problem, number))
                    return  # a file without line breaks is not text
                if line.isspace():
                    continue
                try:
                    yield number, _decode_line(path, number, line)
                except UnreadableInput as error:
                    errors.add(error)
    except OSError as error:
        errors.add(UnreadableInput(path, f"{error.strerror}; give a readable file"))


class NumberedLines:
    """The lines of a file for a reader that counts rows; `number` is that of the last line read."""

    def __init__(self, path: Path, errors: ReadErrors | None = None) -> None:
        self.number = 0
        self._lines = read_lines(path, errors)

    def __iter__(self) -> Iterator[str]:
        for number, line in self._lines:
            self.number = number
            yield line


def _rewind_standard_input() -> BinaryIO:
    """Standard input from its start; a pipe is copied to disk first."""
    if not sys.stdin.seekable():
        copy = tempfile.TemporaryFile()  # noqa: SIM115 - it is closed with the process
        shutil.copyfileobj(sys.stdin.buffer, copy)
        sys.stdin = io.TextIOWrapper(copy)
    sys.stdin.buffer.seek(0)
    return sys.stdin.buffer


def _decode_line(path: Path, number: int, line: bytes) -> str:
    try:
        text = line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise UnreadableInput(
            path, f"byte {error.start + 1} is not valid UTF-8; give a text file in UTF-8", number
        ) from error
    if "\0" in text:
        raise UnreadableInput(path, "it has NUL bytes; give a text file in UTF-8", number)
    return text
