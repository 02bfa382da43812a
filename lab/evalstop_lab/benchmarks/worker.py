"""A process that is handed jobs: one line of JSON in, one line of JSON out."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec

from evalstop_lab.errors import LabError
from evalstop_lab.service_process import end

_T = TypeVar("_T")


class JobFailed(LabError):
    """A measurement broke off."""


class Worker:
    """The other side of such a process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self, job: Any, answer: type[_T]) -> _T:
        """Hand over a job and wait for what came of it; raises JobFailed when that is an error."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(msgspec.json.encode(job).decode() + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise JobFailed(f"Its process ended with {self._process.wait()}.")
        if line.startswith('{"error"'):
            raise JobFailed(msgspec.json.decode(line)["error"])
        return msgspec.json.decode(line, type=answer)


@contextmanager
def worker(command: Sequence[str]) -> Iterator[Worker]:
    """Start one; it ends with the block."""
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield Worker(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        end(process)
