"""The service's own commands as real processes that can be killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


class Program:
    """One `evalstop` command: started, killed, started again."""

    def __init__(self, log: Path, *arguments: str, **environment: str) -> None:
        self._log = log
        self._arguments = arguments
        self._environment = environment
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> str:
        """Start it and give the first line that it prints, which says that it is ready."""
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "evalstop_service.cli", *self._arguments],
                env=os.environ | self._environment,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._arguments[0]} does not start:\n{self._log.read_text()[-5000:]}")
        return line

    def start_server(self) -> dict[str, Any]:
        """Start it and give the document that it prints."""
        document: dict[str, Any] = json.loads(self.start())
        return document

    def kill(self) -> None:
        """kill -9."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None
