"""Runs another program for a receiver: arguments as a list, a time limit, no secrets in its environment."""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from evalstop_client.errors import SchedulerUnavailable

logger = logging.getLogger("evalstop_client.receivers")

MAX_OUTPUT_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Done:
    """How a program ended."""

    exit_code: int
    output: str
    errors: str

    @property
    def last_line(self) -> str:
        lines = (self.errors.strip() or self.output.strip()).splitlines()
        return lines[-1][:300] if lines else f"exit code {self.exit_code}"


def run(command: Sequence[str], environment: Mapping[str, str], timeout_seconds: float) -> Done:
    """Run a program to its end; raises SchedulerUnavailable if it cannot be started or does not end in time."""
    logger.debug("running %s", command)
    try:
        completed = subprocess.run(  # noqa: S603  # a vector that was checked, and no shell
            list(command),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=dict(environment),
            timeout=timeout_seconds,
            check=False,
            start_new_session=True,  # so that a signal to the receiver's group does not reach it
        )
    except subprocess.TimeoutExpired:
        raise SchedulerUnavailable(f"{command[0]} did not end within {timeout_seconds:g} s") from None
    except OSError as error:
        raise SchedulerUnavailable(f"{command[0]} cannot be run: {error}") from None
    output, errors = (text[:MAX_OUTPUT_BYTES].decode(errors="replace") for text in (completed.stdout, completed.stderr))
    return Done(completed.returncode, output, errors)


def copy_environment(*private: str) -> dict[str, str]:
    """The environment without variables that a scheduler's program does not need."""
    return {name: value for name, value in os.environ.items() if name not in private}
