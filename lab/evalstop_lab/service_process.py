"""A service of its own for a demo or a benchmark: the real command in a process, on a port that is free."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from evalstop_lab.errors import ServiceUnavailable

STOP_SECONDS = 15
HERE = {
    "EVALSTOP_WEBHOOK_NETWORKS": "127.0.0.0/8,::1/128",
    "EVALSTOP_MAX_MODE": "enforce",
    "EVALSTOP_HELD_OUT_SHARE": "0",  # what is shown or measured is a stop, and each is carried out
}


@dataclass(frozen=True)
class Service:
    """Where a service answers, a key that may do everything there, and the link that signs a browser in."""

    url: str
    key: str
    sign_in: str


@contextmanager
def running_service(folder: Path, environment: Mapping[str, str] | None = None) -> Iterator[Service]:
    """`evalstop up` on an embedded database in `folder`, stopped at the end of the block; its log is in service.log.

    Its webhooks may go to this machine, where the receivers of a demo and of a benchmark are; its first project holds
    no stop out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log_path = folder / "service.log"
    command = [
        sys.executable,
        "-m",
        "evalstop_service.cli",
        "up",
        "--json",
        "--port",
        "0",
        "--data-folder",
        str(folder),
    ]
    environment = {**os.environ, **HERE, **(environment or {})}
    with log_path.open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise ServiceUnavailable(f"Its log is {log_path}; it ends with: {_last_line(log_path)}")
        said = json.loads(line)
        yield Service(said["url"], said["key"], said["sign_in"])
    finally:
        end(process)


def end(process: subprocess.Popen[str]) -> None:
    """Ask a process to end, and see to it that it does."""
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
    return lines[-1] if lines else "nothing"
