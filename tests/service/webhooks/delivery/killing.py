"""Workers as processes of their own, to be killed."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.service.webhooks.delivery.fakes import DEADLINE_SECONDS

PROGRAM = Path(__file__).parent / "worker_process.py"


class WorkerProcesses:
    """So many workers on one database; one that is killed is followed by another."""

    def __init__(self, url: str, count: int, lease_seconds: float) -> None:
        self._command = [sys.executable, str(PROGRAM), url, str(lease_seconds)]
        self._processes = [subprocess.Popen(self._command) for _ in range(count)]
        self.killed = 0

    def kill_one(self, chance: random.Random) -> None:
        """Kill one, without a word, and start another."""
        which = chance.randrange(len(self._processes))
        self._processes[which].kill()
        self._processes[which].wait()
        self._processes[which] = subprocess.Popen(self._command)
        self.killed += 1

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds; fails after the deadline, or when a worker ended by itself."""
        deadline = time.monotonic() + 2 * DEADLINE_SECONDS
        while not condition():
            assert time.monotonic() < deadline, "the condition was not reached in time"
            assert all(process.poll() is None for process in self._processes), "a worker ended by itself"
            time.sleep(0.02)

    def end(self) -> None:
        """Kill them all."""
        for process in self._processes:
            process.kill()
            process.wait()


@contextmanager
def worker_processes(url: str, count: int, lease_seconds: float) -> Iterator[WorkerProcesses]:
    """Workers for the time of the block."""
    workers = WorkerProcesses(url, count, lease_seconds)
    try:
        yield workers
    finally:
        workers.end()
