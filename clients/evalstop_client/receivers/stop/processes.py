"""The receiver's own process and the programs that it runs: signals, protection of its secrets, subprocesses."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from evalstop_client.errors import SchedulerUnavailable

POLL_SECONDS = 0.5
"""A signal that arrives just before a wait starts does not interrupt it: Python runs the handler between two waits."""


class ShutdownSignal:
    """Waits for SIGTERM and SIGINT instead of exiting; create it on the main thread.

    A signal handler runs between two steps of the main thread. If that thread is just starting to wait for a
    `threading.Event`, setting it in the handler would deadlock; `SimpleQueue.put` is reentrant.
    """

    def __init__(self) -> None:
        self._signals: SimpleQueue[int] = SimpleQueue()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda signaled, _frame: self._signals.put(signaled))

    @property
    def is_set(self) -> bool:
        """Whether one of the signals has arrived."""
        return not self._signals.empty()

    def wait(self, timeout_seconds: float = math.inf) -> bool:
        """Wait for one of the signals; False on timeout."""
        deadline = time.monotonic() + timeout_seconds
        while not self.is_set and (remaining_seconds := deadline - time.monotonic()) > 0:
            try:
                # Put back for the next caller.
                self._signals.put(self._signals.get(timeout=min(remaining_seconds, POLL_SECONDS)))
            except Empty:
                continue
        return self.is_set


PR_SET_DUMPABLE = 4


def forbid_tracing() -> bool:
    """Prevent processes of the same user from reading this one's memory and environment; False if not possible.

    It ends with the next exec, so that jobs can still be traced.
    """
    return set_process_attribute(PR_SET_DUMPABLE, 0)


def set_process_attribute(option: int, value: int) -> bool:
    """Call prctl(2), which only Linux has; False if it is not possible."""
    if sys.platform != "linux":
        return False
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


def run(
    command: Sequence[str],
    environment: Mapping[str, str],
    timeout_seconds: float,
    stderr: int | None = subprocess.PIPE,
) -> Done:
    """Run a program to its end; raises SchedulerUnavailable if it cannot be started or does not end in time.

    `stderr` None: that of the receiver.
    """
    logger.debug("running %s", command)
    try:
        process = subprocess.Popen(  # noqa: S603  # a vector that was checked, and no shell
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
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
    return Done(process.returncode, output.decode(errors="replace"), (errors or b"").decode(errors="replace"))


def copy_environment(*private: str) -> dict[str, str]:
    """The environment without variables that a scheduler's program does not need."""
    return {name: value for name, value in os.environ.items() if name not in private}
