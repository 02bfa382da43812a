"""Starts `evalstop-receiver process` as a program, with jobs in Python."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.clients.fake_service import KEY, FakeServer, FakeService
from tests.clients.programs import running_program, wait_until
from tests.clients.receivers.receiver_program import RECEIVER
from tests.clients.webhooks import SECRET

ENDS_ON_SIGTERM = "import time; print('up', flush=True); time.sleep(3600)"
IGNORES_SIGTERM = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(3600)"
)
SLEEP = "while True: time.sleep(0.1)"
"""For jobs with handlers: a signal just before one long sleep would be handled only after it."""
EXITS_WITH_7 = f"""
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
print('up', flush=True)
{SLEEP}
"""


@dataclass
class ProcessReceiver:
    """A receiver and its job."""

    process: subprocess.Popen[str]
    ready: dict[str, Any]

    @property
    def label(self) -> dict[str, str]:
        return {"receiver": self.ready["receiver"]}

    @property
    def url(self) -> str:
        return str(self.ready["url"])

    def read_line(self) -> str:
        """The next line of the job, whose standard output is the receiver's."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@contextlib.contextmanager
def start_receiver(
    folder: Path, server: FakeServer, code: str, *options: str, **environment: str
) -> Iterator[ProcessReceiver]:
    """A Python job under a receiver that listens; both end with the block."""
    ready = folder / "ready.json"
    command = [
        *RECEIVER, "process", "--url", server.url, "--ready-file", str(ready), *options,
        "--", sys.executable, "-c", code,
    ]  # fmt: skip
    settings = {"EVALSTOP_WEBHOOK_SECRET": SECRET, "EVALSTOP_KEY": KEY, **environment}
    with running_program(command, **settings) as process:
        try:
            wait_until(lambda: ready.exists() or process.poll() is not None)
            yield ProcessReceiver(process, json.loads(ready.read_text()))
        finally:
            if ready.exists():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(json.loads(ready.read_text())["job_pid"], signal.SIGKILL)


@contextlib.contextmanager
def start_job(
    folder: Path, server: FakeServer, code: str, *options: str, **environment: str
) -> Iterator[ProcessReceiver]:
    """As `start_receiver`, once the job has printed `up`."""
    with start_receiver(folder, server, code, *options, **environment) as receiver:
        assert receiver.read_line() == "up"
        yield receiver


def wait_for_report(service: FakeService) -> dict[str, Any]:
    """The only report that the service has."""
    ((_, report),) = wait_until(lambda: service.reports)
    return report
