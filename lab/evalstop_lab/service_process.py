"""Starts a service, or a trainer under a receiver, in processes of their own, for demos and benchmarks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from evalstop_lab.errors import ServiceUnavailable

START_SECONDS = 30.0
STOP_SECONDS = 15
SETTINGS = {
    "EVALSTOP_WEBHOOK_NETWORKS": "127.0.0.0/8,::1/128",
    "EVALSTOP_MAX_MODE": "enforce",
    "EVALSTOP_HELD_OUT_SHARE": "0",  # every stop is carried out
    "EVALSTOP_VETO_WINDOW_SECONDS": "0",  # and at once: nobody is there to veto it
}


@dataclass(frozen=True)
class Service:
    """A running service: its URL, an admin key, a link that signs in a browser, and its process id."""

    url: str
    key: str
    sign_in: str = ""
    pid: int = 0

    def connect(self, timeout_seconds: float = 60.0) -> httpx.Client:
        """An HTTP client of its API that sends the key."""
        headers = {"Authorization": f"Bearer {self.key}"}
        return httpx.Client(base_url=f"{self.url}/api/v1", headers=headers, timeout=timeout_seconds, trust_env=False)


@contextmanager
def running_service(folder: Path, environment: Mapping[str, str] | None = None) -> Iterator[Service]:
    """Run `evalstop up` on an embedded database in `folder` within the block; its log is service.log.

    Webhooks to this machine are allowed. The first project holds out no stops.
    """
    folder = folder.resolve()
    command = [sys.executable, "-m", "evalstop_service.cli", "up", "--json", "--port", "0"]
    command += ["--data-folder", str(folder)]
    with run_server(command, folder / "service.log", {**SETTINGS, **(environment or {})}) as service:
        yield service


@contextmanager
def run_trainer(service: Service, folder: Path, trainer: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """Run a trainer within the block as the child of `evalstop-receiver process`, which stops it.

    `trainer`: the arguments of Python. The receiver's log is receiver.log.
    """
    ready, secret, log = folder / "ready.json", folder / "secret", folder / "receiver.log"
    for file in (ready, secret):
        file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "evalstop_client.receivers.cli", "process"]
    command += ["--secret-file", str(secret), "--ready-file", str(ready), "--job-key-env", "EVALSTOP_KEY"]
    command += ["--", sys.executable, *trainer]
    environment = {"EVALSTOP_URL": service.url, "EVALSTOP_KEY": service.key}
    with run_logged(command, log, environment, stdout=subprocess.PIPE) as process, service.connect() as api:
        wait_until(lambda: ready.exists() or process.poll() is not None, START_SECONDS)
        if not ready.exists():
            raise ServiceUnavailable(f"The receiver does not start; its log {log} ends with: {_read_end(log)}")
        endpoint = {"url": json.loads(ready.read_text())["url"], "event_types": ["run.stop_requested"]}
        created = api.post("/endpoints", json=endpoint).raise_for_status().json()
        secret.touch(mode=0o600)
        secret.write_text(created["secret"])
        yield process


@contextmanager
def run_server(command: Sequence[str], log: Path, environment: Mapping[str, str], key: str = "") -> Iterator[Service]:
    """Run a server within the block that prints one line of JSON when it is ready; `key`: if the line has none."""
    with run_logged(command, log, environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise ServiceUnavailable(f"Its log is {log}; it ends with: {_read_end(log)}")
        ready = json.loads(line)
        yield Service(ready.get("url", ""), ready.get("key") or key, ready.get("sign_in", ""), process.pid)


@contextmanager
def run_logged(
    command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None, stdout: int | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Run a process in the folder of its log; it is terminated at the end of the block."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stdout or file,
            stderr=file,
            text=True,
            env=os.environ | (environment or {}),
            cwd=log.parent,
        )
    try:
        yield process
    finally:
        end_process(process)


def wait_until(condition: Callable[..., bool], seconds: float) -> None:
    """Wait until the condition holds, at most so long."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)


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


def _read_end(log: Path) -> str:
    return log.read_text()[-500:]
