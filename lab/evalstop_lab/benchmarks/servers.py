"""The servers that are measured, each the real command in a process of its own on a free port of this machine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from evalstop_lab.errors import ServiceUnavailable
from evalstop_lab.service_process import end

START_SECONDS = 90.0


@dataclass(frozen=True)
class Server:
    """A running server: where it listens, the key it wants, its process."""

    address: tuple[str, int]
    pid: int
    key: str | None = None

    @property
    def url(self) -> str:
        return "http://{}:{}".format(*self.address)


@contextmanager
def evalstop(folder: Path, key: str, environment: Mapping[str, str], port: int = 0) -> Iterator[Server]:
    """`evalstop serve` on a database that is at head; its log is in the folder."""
    command = [sys.executable, "-m", "evalstop_service.cli", "serve", "--json", "--port", str(port)]
    with _saying_where(command, folder / "serve.log", environment) as (address, pid):
        yield Server(address, pid, key)


def prepared(environment: Mapping[str, str]) -> str:
    """Bring the database that the environment names to head; gives a key that may do everything in its project."""
    _evalstop(["migrate"], environment)
    _evalstop(["project", "create", "default", "--held-out-share", "0"], environment)
    made = _evalstop(["key", "create", "--name", "bench", "--scopes", "admin", "--json"], environment)
    key: str = json.loads(made)["key"]
    return key


def _evalstop(arguments: Sequence[str], environment: Mapping[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "evalstop_service.cli", *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise ServiceUnavailable(f"`evalstop {' '.join(arguments)}` says: {done.stderr.strip()}")
    return done.stdout


@contextmanager
def bare_route(folder: Path) -> Iterator[Server]:
    """The bare ASGI route."""
    command = [sys.executable, "-m", "evalstop_lab.benchmarks.bare_route"]
    with _saying_where(command, folder / "bare.log", {}) as (address, pid):
        yield Server(address, pid)


@contextmanager
def mlflow(python: Path, folder: Path, database_url: str) -> Iterator[Server]:
    """MLflow's tracking server with one worker, its access log off."""
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    command = [
        *(str(python), "-m", "mlflow", "server", "--backend-store-uri", database_url),
        *("--host", "127.0.0.1", "--port", str(port), "--workers", "1", "--uvicorn-opts", "--log-level warning"),
        *("--artifacts-destination", str(folder / "artifacts")),
    ]
    environment = {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",
        "MLFLOW_SQLALCHEMYSTORE_POOL_SIZE": "40",  # its threads; at its default of 5, 64 clients run into timeouts
    }
    with _process(command, folder / "mlflow.log", environment) as process:
        wait_until_healthy(f"http://127.0.0.1:{port}/health", process, folder / "mlflow.log")
        yield Server(("127.0.0.1", port), process.pid)


def wait_until_healthy(url: str, process: subprocess.Popen[str], log: Path) -> None:
    """Return once a server answers 200; raises when it ended or does not within its time."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            if httpx.get(url, timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        if process.poll() is not None or time.monotonic() > deadline:
            raise ServiceUnavailable(f"{url} does not answer; the log ends with: {log.read_text()[-500:]}")
        time.sleep(0.1)


def resident_bytes(pid: int) -> int:
    """How much memory a process holds."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port


@contextmanager
def _saying_where(
    command: Sequence[str], log: Path, environment: Mapping[str, str]
) -> Iterator[tuple[tuple[str, int], int]]:
    """A server whose first line of output is JSON with its URL."""
    with _process(command, log, environment) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise ServiceUnavailable(f"Its log ends with: {log.read_text()[-500:]}")
        url = httpx.URL(json.loads(line)["url"])
        assert url.port is not None
        yield (url.host, url.port), process.pid


@contextmanager
def _process(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as written:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if "--json" in command or "bare_route" in command[-1] else written,
            stderr=written,
            text=True,
            env=os.environ | environment,
            cwd=log.parent,
        )
    try:
        yield process
    finally:
        end(process)
