"""Delivery workers in processes that tests kill."""

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
    """Several workers on one database; a killed worker is replaced."""

    def __init__(self, url: str, count: int, lease_seconds: float) -> None:
        self._arguments = (url, lease_seconds)
        self._processes = [self._start() for _ in range(count)]
        self.killed = 0

    def kill_random_worker(self, random_source: random.Random) -> None:
        """Kill a random worker with SIGKILL and start another."""
        index = random_source.randrange(len(self._processes))
        self._processes[index].kill()
        self._processes[index].join()
        self._processes[index] = self._start()
        self.killed += 1

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait for the condition; fail after the deadline, or when a worker exits on its own."""
        deadline = time.monotonic() + 2 * DEADLINE_SECONDS
        while not condition():
            assert time.monotonic() < deadline, "the condition was not reached in time"
            assert all(process.is_alive() for process in self._processes), "a worker exited on its own"
            time.sleep(0.02)

    def kill_all(self) -> None:
        """Kill all workers."""
        for process in self._processes:
            process.kill()
            process.join()

    def _start(self) -> ForkServerProcess:
        process: ForkServerProcess = FORKSERVER.Process(target=worker_process.run_worker, args=self._arguments)
        process.start()
        return process


@contextmanager
def run_worker_processes(url: str, count: int, lease_seconds: float) -> Iterator[WorkerProcesses]:
    """Run workers until the block ends."""
    workers = WorkerProcesses(url, count, lease_seconds)
    try:
        yield workers
    finally:
        workers.kill_all()
