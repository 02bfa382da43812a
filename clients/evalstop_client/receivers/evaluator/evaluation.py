"""One evaluation of one checkpoint by a program of the operator's: its output is bounded, and so is its time."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence

from evalstop_client.errors import EvalStopError
from evalstop_client.eval_request import Scores, Summary

logger = logging.getLogger("evalstop_client.receivers")

MAX_OUTPUT_BYTES = 16 * 2**20
MAX_SCORES = 1_000_000
LOOK_SECONDS = 0.2
PLACES = ("{checkpoint}", "{n}", "{seed}")
URI = re.compile(r"[A-Za-z0-9_/.][\x21-\x7e]{0,4095}", re.ASCII)


class EvaluationFailed(EvalStopError):
    """A checkpoint could not be evaluated."""


def fill_command(command: Sequence[str], uri: str, prompts: int, seed: int, prefixes: Sequence[str]) -> list[str]:
    """The program's arguments for a checkpoint; raises EvaluationFailed for one that may not be loaded.

    Whoever may report a run names its checkpoints, and to load one may be to run code that is in it.
    """
    if not URI.fullmatch(uri) or ".." in uri or not uri.startswith(tuple(prefixes)):
        raise EvaluationFailed(f"the checkpoint {uri[:200]!r} does not begin with {' or '.join(prefixes)}")
    values = dict(zip(PLACES, (uri, str(prompts), str(seed)), strict=True))
    return [_replace_places(argument, values) for argument in command]


def _replace_places(argument: str, values: dict[str, str]) -> str:
    return re.sub("|".join(map(re.escape, PLACES)), lambda match: values[match[0]], argument)


def evaluate(
    command: Sequence[str], environment: dict[str, str], timeout_seconds: float, ended: threading.Event
) -> Scores:
    """Run the program in a process group of its own and read its scores; raises EvaluationFailed, also once `ended`."""
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
                    raise EvaluationFailed("the evaluator was told to end")
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(LOOK_SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # also what it left behind
            process.wait()
        if process.returncode != 0:
            raise EvaluationFailed(f"{command[0]} ended with {process.returncode}")
        output.seek(0)
        return read_scores(output.read(MAX_OUTPUT_BYTES + 1))


def read_scores(output: bytes) -> Scores:
    """The scores in JSON lines: a number or `{"score": number}` a prompt, or one `{"mean": ..., "stderr": ...}`."""
    if len(output) > MAX_OUTPUT_BYTES:
        raise EvaluationFailed(f"the output has more than {MAX_OUTPUT_BYTES} bytes")
    scores: list[float] = []
    for number, line in enumerate(output.splitlines(), 1):
        if not line.strip():
            continue
        try:
            said = json.loads(line)
            if isinstance(said, dict) and "mean" in said:
                return Summary(float(said["mean"]), float(said["stderr"]))
            scores.append(float(said["score"] if isinstance(said, dict) else said))
        except (ValueError, TypeError, KeyError, RecursionError):
            raise EvaluationFailed(f"line {number} of the output is no score: {line[:80]!r}") from None
        if len(scores) > MAX_SCORES:
            raise EvaluationFailed(f"the output has more than {MAX_SCORES} scores")
    return scores
