"""Runs commands of the service until they end."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from subprocess import CompletedProcess
from tempfile import TemporaryDirectory

from evalstop_service import cli

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


def send_switch_intervals(
    commands: Sequence[Sequence[str]], environment: Mapping[str, str], answer: Connection
) -> None:
    """Run commands in this process and send the interpreter's switch interval after each."""
    os.environ.update(environment)
    for arguments in commands:
        sys.setswitchinterval(0.005)  # Python's default
        cli.main(arguments)
        answer.send(sys.getswitchinterval())
