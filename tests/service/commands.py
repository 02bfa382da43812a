"""Runs commands of the service until they end."""

from __future__ import annotations

from pathlib import Path
from subprocess import CompletedProcess
from tempfile import TemporaryDirectory

from tests.fixtures.forked_commands import ForkedCommand

TIMEOUT_SECONDS = 60


def run_evalstop(environment: dict[str, str], *arguments: str) -> CompletedProcess[str]:
    """Run `evalstop` with these arguments until it ends."""
    with TemporaryDirectory() as folder:
        errors = Path(folder, "stderr")
        command = ForkedCommand(arguments, environment, errors)
        with command.stdout:
            printed = command.stdout.read()
        return CompletedProcess(arguments, command.wait(TIMEOUT_SECONDS), printed, errors.read_text())
