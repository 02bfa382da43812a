"""The load of a benchmark: wrk's connections post batches of new observations, each as soon as it is answered."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from evalstop_lab.benchmarks.processes import JobFailed
from evalstop_lab.errors import UnusableArguments

LONGEST_SECONDS = 600


@dataclass(frozen=True, kw_only=True)
class Load:
    """The result of a load; `observations` are those acknowledged, `refused` the requests answered by an error."""

    observations: int
    requests: int
    refused: int
    seconds: float
    p50_ms: float
    p99_ms: float

    @property
    def per_second(self) -> float:
        return self.observations / self.seconds


def find_wrk() -> str:
    """The load generator; raises UnusableArguments if it is not installed."""
    program = shutil.which("wrk")
    if program is None:
        raise UnusableArguments("This benchmark needs wrk (on Debian: apt install wrk).")
    return program


def run_load(
    addresses: Sequence[tuple[str, int]],
    runs: Sequence[str],
    key: str,
    *,
    clients: int,
    batch: int,
    seconds: int = LONGEST_SECONDS,
    requests: int = 0,
    first_step: int = 0,
) -> Load:
    """Post to these runs in turns for so many whole seconds, or until so many requests have been answered.

    Each address gets its share of the clients and runs. With several, `requests` are those of the first to get as many.
    Raises JobFailed if connections break or nothing is accepted.
    """
    threads = min(len(addresses), clients)
    with tempfile.NamedTemporaryFile("w", suffix=".runs") as file:
        file.write("\n".join(runs) + "\n")
        file.flush()
        command = [find_wrk(), f"-t{threads}", f"-c{clients}", f"-d{seconds}s", "--timeout", f"{LONGEST_SECONDS}s"]
        command += ["-s", str(Path(__file__).with_suffix(".lua")), "http://{}:{}".format(*addresses[0]), "--"]
        places = " ".join(f"{host}:{port}" for host, port in addresses)
        command += [file.name, key, places, str(batch), str(first_step), str(requests)]
        completed = subprocess.run(command, capture_output=True, text=True)
    if completed.returncode:
        raise JobFailed(completed.stderr or completed.stdout)
    figures = json.loads(completed.stderr.splitlines()[-1])
    broken, accepted = figures.pop("broken"), figures["requests"] - figures["refused"]
    if broken or not accepted:
        raise JobFailed(f"{broken} connections broke, {figures['refused']} of {figures['requests']} were refused.")
    return Load(observations=accepted * batch, **figures)
