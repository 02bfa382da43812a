"""The commands of the service as real processes that tests can kill and start again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.fixtures.exit_status import check_not_crashed, read_end
from tests.fixtures.forked_commands import ForkedCommand

FAST_DELIVERY = {"EVALSTOP_DELIVERY_TIMEOUT_SECONDS": "1"}
"""Settings with which another worker soon takes over the deliveries of a killed one."""

KILL_SECONDS = 60.0
"""The longest that a killed process takes to end."""

PYTHON_VARIABLES = {"LD_PRELOAD", "PYTHONPATH"}
"""Variables that change how Python itself starts."""


class Program:
    """One `evalstop` command that can be started, terminated, killed and started again.

    `under` is the command line of a wrapper such as `prlimit` or `unshare`. Without a wrapper, and without a variable
    from PYTHON_VARIABLES, the command is forked from a process that has already imported it.
    """

    def __init__(self, log: Path, *arguments: str, under: Sequence[str] = (), **environment: str) -> None:
        self._log = log
        self._arguments = arguments
        self._under = under
        self._environment = environment
        self._process: subprocess.Popen[str] | ForkedCommand | None = None
        self._asked_to_end: subprocess.Popen[str] | ForkedCommand | None = None

    @property
    def pid(self) -> int:
        """The process id of the last start."""
        assert self._process is not None
        return self._process.pid

    def launch(self) -> None:
        """Start the process without waiting until it is ready."""
        environment = os.environ | self._environment
        if not self._under and not PYTHON_VARIABLES & self._environment.keys():
            self._process = ForkedCommand(self._arguments, environment, self._log)
            return
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                [*self._under, sys.executable, "-m", "evalstop_service.cli", *self._arguments],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def wait_until_ready(self) -> str:
        """Wait for the first line of output, which is printed once the command is ready."""
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._arguments[0]} does not start:\n{read_end(self._log)}")
        return line

    def start(self) -> str:
        """Start the process; returns its first line of output."""
        self.launch()
        return self.wait_until_ready()

    def wait_until_server_ready(self) -> dict[str, Any]:
        """Wait until a server listens; returns the JSON that it prints."""
        document: dict[str, Any] = json.loads(self.wait_until_ready())
        return document

    def start_server(self) -> dict[str, Any]:
        """Start a server; returns the JSON that it prints."""
        self.launch()
        return self.wait_until_server_ready()

    def read_log(self) -> str:
        """The log so far."""
        return self._log.read_text()

    def check_running(self) -> None:
        """Fail with the end of the log if the process has ended by itself; may be called from any thread."""
        process = self._process
        status = None if process is None else process.poll()
        if status is not None and process is not self._asked_to_end:
            raise AssertionError(f"{self._arguments[0]} ended with {status}:\n{read_end(self._log)}")

    def terminate(self) -> None:
        """Send SIGTERM."""
        assert self._process is not None
        self._asked_to_end = self._process
        self._process.terminate()

    def wait(self, timeout_seconds: float) -> int:
        """Wait until the process exits; returns its exit status. A crash fails the test."""
        assert self._process is not None
        self._asked_to_end = process = self._process
        status = process.wait(timeout_seconds)
        self._process = None
        assert process.stdout is not None
        process.stdout.close()
        check_not_crashed(self._arguments[0], status, self._log)
        return status

    def kill(self) -> None:
        """Send SIGKILL and wait; fails the test if the process had crashed before."""
        if self._process is not None:
            self._asked_to_end = self._process
            self._process.kill()
            self.wait(KILL_SECONDS)
