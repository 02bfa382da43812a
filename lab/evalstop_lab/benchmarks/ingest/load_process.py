"""Runs the load generator in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from evalstop_lab.benchmarks.ingest.load_generator import Job, Load
from evalstop_lab.benchmarks.processes import JobFailed
from evalstop_lab.service_process import end_process


class LoadGenerator:
    """A process that reads loads to generate, one per line of JSON, and answers each with one line of JSON."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def generate(self, job: Job) -> Load:
        """Generate a load and wait for its result; raises JobFailed if it is an error."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(msgspec.json.encode(job).decode() + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise JobFailed(f"The load generator exited with {self._process.wait()}.")
        if line.startswith('{"error"'):
            raise JobFailed(msgspec.json.decode(line)["error"])
        return msgspec.json.decode(line, type=Load)


@contextmanager
def start_load_generator() -> Iterator[LoadGenerator]:
    command = [sys.executable, "-m", "evalstop_lab.benchmarks.ingest.load_generator"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield LoadGenerator(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        end_process(process)
