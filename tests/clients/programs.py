"""Starts real programs for tests, waits for what they do, and ends each by its own process id."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from tests.clients import fake_service

T = TypeVar("T")
FAKE_SERVICE = Path(fake_service.__file__)


def eventually(look: Callable[[], T], seconds: float = 20.0) -> T:
    """The first true value of `look`; fails when there is none in time."""
    deadline = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)
    return found


@contextlib.contextmanager
def program(command: Sequence[str], **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A program that is ended with the block if it has not ended by itself."""
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment})
    try:
        yield child
    finally:
        if child.poll() is None:
            child.kill()
        child.communicate()


@contextlib.contextmanager
def trainer(script: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A Python script in a process of its own."""
    with program([sys.executable, "-c", script], **environment) as child:
        yield child


@contextlib.contextmanager
def service_program(record: Path, port: int = 0) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The fake service as a process that can be killed, and its port."""
    with program([sys.executable, str(FAKE_SERVICE), "--port", str(port), "--record", str(record)]) as child:
        assert child.stdout is not None
        ready = json.loads(child.stdout.readline())
        yield child, int(ready["url"].rpartition(":")[2])


def is_alive(pid: int) -> bool:
    """Whether a process runs; a dead one that nobody has buried does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False
