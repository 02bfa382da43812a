"""The receiver's own process and the programs that it runs: signals, protection of its secrets, subprocesses."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from evalstop_client.errors import SchedulerUnavailable

POLL_SECONDS = 0.5
"""A signal that arrives just before a wait starts does not interrupt it: Python runs the handler between two waits."""


def exit_on_signals() -> None:
    """From now on SIGTERM and SIGINT raise SystemExit in the main thread, with exit code 0."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit())


def ignore_signals() -> None:
    """From now on SIGTERM and SIGINT have no effect."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36


def forbid_tracing() -> None:
    """Prevent processes of the same user from reading this one's memory and environment, until the next exec."""
    _set_process_attribute(PR_SET_DUMPABLE, 0)


def adopt_orphans() -> bool:
    """Make this process the parent of every descendant whose parent dies; False if that is not possible."""
    return _set_process_attribute(PR_SET_CHILD_SUBREAPER, 1)


def _set_process_attribute(option: int, value: int) -> bool:
    """Call prctl(2), which only Linux has; False if it is not possible."""
    try:
        return int(ctypes.CDLL(None).prctl(option, value, 0, 0, 0)) == 0
    except (OSError, AttributeError):
        return False


logger = logging.getLogger("evalstop_client.receivers")


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
        process = subprocess.Popen(  # noqa: S603  # a vector that was checked, and no shell
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(environment),
            start_new_session=True,  # so that a signal to the receiver's group does not reach it
        )
    except OSError as error:
        raise SchedulerUnavailable(f"{command[0]} cannot be run: {error}") from None
    with process:
        try:
            output, errors = process.communicate(timeout=timeout_seconds)
        except BaseException as error:  # also the SystemExit of a signal
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # with its children
            if isinstance(error, subprocess.TimeoutExpired):
                raise SchedulerUnavailable(f"{command[0]} did not end within {timeout_seconds:g} s") from None
            raise
    return Done(process.returncode, output.decode(errors="replace"), errors.decode(errors="replace"))


def copy_environment(*private: str) -> dict[str, str]:
    """The environment without variables that a scheduler's program does not need."""
    return {name: value for name, value in os.environ.items() if name not in private}
