"""Reads the numbered lines of a file."""

from __future__ import annotations

import gzip
import io
import shutil
import sys
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import BinaryIO, cast

from evalstop_lab.errors import UnreadableInput
from evalstop_lab.replay.runs import ReadErrors

LONGEST_LINE = 1 << 20
STANDARD_INPUT = Path("-")


def without_gz(path: Path) -> Path:
    """The name of what a gzipped file holds; other paths as they are."""
    return path.with_suffix("") if path.suffix == ".gz" else path


def open_log(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path)) if path.suffix == ".gz" else path.open("rb")


def read_lines(path: Path, errors: ReadErrors | None = None) -> Iterator[tuple[int, str]]:
    """Yield each nonblank line with its number, from 1; invalid text is reported to `errors`."""
    errors = errors or ReadErrors()
    try:
        with nullcontext(_rewind_standard_input()) if path == STANDARD_INPUT else open_log(path) as file:
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
        errors.add(UnreadableInput(path, f"{error.strerror or error}; give a readable file"))
    except (EOFError, zlib.error) as error:
        errors.warn(UnreadableInput(path, f"its compression ends early or is damaged; all before is read ({error})"))


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
