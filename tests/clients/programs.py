"""Starts real programs for tests, waits for conditions, and ends each program by its own process id."""

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
from tests.fixtures.exit_status import check_not_crashed

T = TypeVar("T")
FAKE_SERVICE = Path(fake_service.__file__)


def wait_until(condition: Callable[[], T], seconds: float = 60.0) -> T:
    """The first true value of `condition`; fails if there is none in time."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not true within {seconds:g} s"
        time.sleep(0.02)
    return value


@contextlib.contextmanager
def running_program(command: Sequence[str], **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A program, killed at the end of the block if it still runs; a crash fails the test."""
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment})
    try:
        yield child
    finally:
        if child.poll() is None:
            child.kill()
        child.communicate()
        check_not_crashed(command[0], child.returncode)


@contextlib.contextmanager
def running_script(script: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A Python script in a process of its own."""
    with running_program([sys.executable, "-c", script], **environment) as child:
        yield child


@contextlib.contextmanager
def running_fake_service(record: Path, port: int = 0) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The fake service as a process that can be killed, and its port."""
    with running_program([sys.executable, str(FAKE_SERVICE), "--port", str(port), "--record", str(record)]) as child:
        assert child.stdout is not None
        ready = json.loads(child.stdout.readline())
        yield child, int(ready["url"].rpartition(":")[2])


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False
