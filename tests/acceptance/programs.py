"""The service's own commands as real processes that can be killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.fixtures.forked_commands import ForkedCommand

OF_PYTHON = {"LD_PRELOAD", "PYTHONPATH"}
"""Variables that change how Python itself starts."""


class Program:
    """One `evalstop` command: started, told to end or killed, started again.

    `under`: the words of a command that it is started by, such as `prlimit` or `unshare`, which becomes the program.
    Without them, and without a variable that is meant for Python, it is forked from a process that has imported it.
    """

    def __init__(self, log: Path, *arguments: str, under: Sequence[str] = (), **environment: str) -> None:
        self._log = log
        self._arguments = arguments
        self._under = under
        self._environment = environment
        self._process: subprocess.Popen[str] | ForkedCommand | None = None

    @property
    def pid(self) -> int:
        """Of the process that was started last."""
        assert self._process is not None
        return self._process.pid

    def launch(self) -> None:
        """Start it without waiting for it."""
        environment = os.environ | self._environment
        if not self._under and not OF_PYTHON & self._environment.keys():
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

    def ready(self) -> str:
        """The first line that it prints, which says that it is ready."""
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._arguments[0]} does not start:\n{self.said()[-5000:]}")
        return line

    def start(self) -> str:
        """Start it and give the first line that it prints."""
        self.launch()
        return self.ready()

    def ready_server(self) -> dict[str, Any]:
        """The document that a server prints once it listens."""
        document: dict[str, Any] = json.loads(self.ready())
        return document

    def start_server(self) -> dict[str, Any]:
        """Start it and give the document that it prints."""
        self.launch()
        return self.ready_server()

    def said(self) -> str:
        """Its log so far."""
        return self._log.read_text()

    def terminate(self) -> None:
        """SIGTERM."""
        assert self._process is not None
        self._process.terminate()

    def wait(self, timeout_seconds: float) -> int:
        """Wait for its end; gives its exit status."""
        assert self._process is not None
        status = self._process.wait(timeout_seconds)
        self._forget()
        return status

    def kill(self) -> None:
        """kill -9."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._forget()

    def _forget(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process = None
