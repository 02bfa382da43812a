"""Evaluates checkpoints with the operator's program, with limits on its output and time."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from evalstop_client.eval_request import Difference, Scores, compare_scores
from evalstop_client.receivers.evaluator.evaluation import (
    MAX_OUTPUT_BYTES,
    EvaluationFailed,
    PairedRequest,
    check_uri,
    fill_places,
    read_scores,
)

LOOK_SECONDS = 0.2


@dataclass(frozen=True)
class CommandEvaluation:
    """Runs a command with placeholders for one checkpoint after the other; none once `ended` is set."""

    command: Sequence[str]
    environment: dict[str, str]
    prefixes: Sequence[str]
    timeout_seconds: float
    ended: threading.Event
    tries: int = 3

    def compare(self, request: PairedRequest) -> Difference:
        best, current = (self._evaluate(uri, request) for uri in (request.best_uri, request.current_uri))
        return compare_scores(best, current)

    def _evaluate(self, uri: str, request: PairedRequest) -> Scores:
        command = fill_command(self.command, uri, request.prompts, request.seed, self.prefixes)
        return evaluate(command, self.environment, self.timeout_seconds, self.ended)


def fill_command(command: Sequence[str], uri: str, prompts: int, seed: int, prefixes: Sequence[str]) -> list[str]:
    """The command for a checkpoint; raises EvaluationFailed if it may not be loaded."""
    check_uri(uri, prefixes)
    return [fill_places(argument, (uri, str(prompts), str(seed))) for argument in command]


def evaluate(
    command: Sequence[str], environment: dict[str, str], timeout_seconds: float, ended: threading.Event
) -> Scores:
    """Run the program in a new process group and read its scores; raises EvaluationFailed, also once `ended` is set."""
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(  # noqa: S603  # a vector that was checked, and no shell
                list(command), stdin=subprocess.DEVNULL, stdout=output, env=environment, start_new_session=True
            )
        except OSError as error:
            raise EvaluationFailed(f"{command[0]} cannot be run: {error}") from None
        deadline = time.monotonic() + timeout_seconds
        try:
            while process.poll() is None:
                if time.monotonic() > deadline:
                    raise EvaluationFailed(f"{command[0]} did not end within {timeout_seconds:g} s")
                if os.fstat(output.fileno()).st_size > MAX_OUTPUT_BYTES:
                    raise EvaluationFailed(f"{command[0]} wrote more than {MAX_OUTPUT_BYTES} bytes")
                if ended.is_set():
                    raise EvaluationFailed("the evaluator is shutting down")
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(LOOK_SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # also remaining child processes
            process.wait()
        if process.returncode != 0:
            raise EvaluationFailed(f"{command[0]} ended with {process.returncode}")
        output.seek(0)
        return read_scores(output.read(MAX_OUTPUT_BYTES + 1))
