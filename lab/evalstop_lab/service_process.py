"""Starts a service in its own process, on a free port, for demos and benchmarks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from evalstop_lab.errors import ServiceUnavailable

STOP_SECONDS = 15
SETTINGS = {
    "EVALSTOP_WEBHOOK_NETWORKS": "127.0.0.0/8,::1/128",
    "EVALSTOP_MAX_MODE": "enforce",
    "EVALSTOP_HELD_OUT_SHARE": "0",  # every stop is carried out
}


@dataclass(frozen=True)
class Service:
    """A running service: its URL, an admin key, and a link that signs in a browser."""

    url: str
    key: str
    sign_in: str

    def connect(self) -> httpx.Client:
        """An HTTP client of its API that sends the key."""
        headers = {"Authorization": f"Bearer {self.key}"}
        return httpx.Client(base_url=f"{self.url}/api/v1", headers=headers, timeout=30, trust_env=False)


@contextmanager
def running_service(folder: Path, environment: Mapping[str, str] | None = None) -> Iterator[Service]:
    """Run `evalstop up` on an embedded database in `folder` within the block; its log is service.log.

    Webhooks to this machine are allowed. The first project holds out no stops.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log_path = folder / "service.log"
    command = [sys.executable, "-m", "evalstop_service.cli", "up", "--json", "--port", "0"]
    command += ["--data-folder", str(folder)]
    environment = {**os.environ, **SETTINGS, **(environment or {})}
    with log_path.open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise ServiceUnavailable(f"Its log is {log_path}; it ends with: {_last_line(log_path)}")
        announcement = json.loads(line)
        yield Service(announcement["url"], announcement["key"], announcement["sign_in"])
    finally:
        end_process(process)


def end_process(process: subprocess.Popen[str]) -> None:
    """Terminate a process; kill it after `STOP_SECONDS`."""
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _last_line(path: Path) -> str:
    lines = path.read_text().splitlines()
    return lines[-1] if lines else "(empty)"
