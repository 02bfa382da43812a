"""Workers as processes of their own, to be killed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerProcess

from tests.fixtures.forked_commands import FORKSERVER
from tests.service.webhooks.delivery import worker_process
from tests.service.webhooks.delivery.fakes import DEADLINE_SECONDS


class WorkerProcesses:
    """So many workers on one database; one that is killed is followed by another."""

    def __init__(self, url: str, count: int, lease_seconds: float) -> None:
        self._arguments = (url, lease_seconds)
        self._processes = [self._start() for _ in range(count)]
        self.killed = 0

    def kill_one(self, chance: random.Random) -> None:
        """Kill one, without a word, and start another."""
        which = chance.randrange(len(self._processes))
        self._processes[which].kill()
        self._processes[which].join()
        self._processes[which] = self._start()
        self.killed += 1

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds; fails after the deadline, or when a worker ended by itself."""
        deadline = time.monotonic() + 2 * DEADLINE_SECONDS
        while not condition():
            assert time.monotonic() < deadline, "the condition was not reached in time"
            assert all(process.is_alive() for process in self._processes), "a worker ended by itself"
            time.sleep(0.02)

    def end(self) -> None:
        """Kill them all."""
        for process in self._processes:
            process.kill()
            process.join()

    def _start(self) -> ForkServerProcess:
        process: ForkServerProcess = FORKSERVER.Process(target=worker_process.run, args=self._arguments)
        process.start()
        return process


@contextmanager
def worker_processes(url: str, count: int, lease_seconds: float) -> Iterator[WorkerProcesses]:
    """Workers for the time of the block."""
    workers = WorkerProcesses(url, count, lease_seconds)
    try:
        yield workers
    finally:
        workers.end()
