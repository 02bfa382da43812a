"""Runs commands of the service until they end."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from io import StringIO
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


def send_switch_interval(arguments: Sequence[str], environment: Mapping[str, str], answer: Connection) -> None:
    """Run a server in this process, and send the interpreter's switch interval when it prints its address."""
    os.environ.update(environment)

    class Printed(StringIO):
        def flush(self) -> None:
            answer.send(sys.getswitchinterval())

    with redirect_stdout(Printed()):
        cli.main([*arguments, "--json"])
