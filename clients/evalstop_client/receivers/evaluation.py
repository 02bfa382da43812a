"""How a checkpoint is evaluated: by a command that prints scores, and what its answer must hold."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from urllib.parse import unquote

from evalstop_client.errors import ConfigurationError, EvalStopError
from evalstop_client.eval_request import Difference, Scores, Summary, compare_scores

MAX_OUTPUT_BYTES = 16 * 2**20
MAX_SCORES = 1_000_000
PLACES = ("{checkpoint}", "{n}", "{seed}")
URI = re.compile(r"[A-Za-z0-9_/.][\x21-\x7e]{0,4095}", re.ASCII)
ENCODED_SEPARATOR = re.compile("%(?:2e|2f|5c)", re.IGNORECASE)


class EvaluationFailed(EvalStopError):
    """A checkpoint could not be evaluated."""


@dataclass(frozen=True)
class PairedRequest:
    """A request of the service: evaluate both checkpoints on the same prompts, drawn with `seed`."""

    id: str
    run_id: str
    best_uri: str
    current_uri: str
    prompts: int
    seed: int


def check_uri(uri: str, prefixes: Sequence[str]) -> None:
    """Raise EvaluationFailed for a checkpoint that may not be loaded.

    Anyone who may report a run names its checkpoints, and loading a checkpoint may run code in it.
    """
    if not URI.fullmatch(uri) or not any(_lies_below(uri, prefix) for prefix in prefixes):
        raise EvaluationFailed(f"the checkpoint {uri[:200]!r} is not below {' or '.join(prefixes)}")
    if _leads_elsewhere(uri):
        raise EvaluationFailed(f"the checkpoint {uri[:200]!r} has a `..`, a backslash, or an encoded dot or slash")


def _lies_below(uri: str, prefix: str) -> bool:
    """Whether the text begins with the prefix and a `/`, so that `s3://runs` does not admit `s3://runs-of-others/x`."""
    return prefix != "" and (uri == prefix or uri.startswith(prefix if prefix.endswith("/") else f"{prefix}/"))


def _leads_elsewhere(uri: str) -> bool:
    """Whether a program that decodes the URI, once or more often, could find another place than its text names."""
    while True:
        # U+FFFD stands for bytes that are no UTF-8, which careless decoders read as dots and slashes.
        if ".." in uri or "\\" in uri or "\ufffd" in uri or not uri.isprintable() or ENCODED_SEPARATOR.search(uri):
            return True
        decoded = unquote(uri)
        if decoded == uri:
            return False
        uri = decoded


def check_places(where: str, arguments: Sequence[str]) -> None:
    """Raise ConfigurationError unless all of PLACES are in the arguments, and the checkpoint is not part of a
    script."""
    missing = [placeholder for placeholder in PLACES if not any(placeholder in argument for argument in arguments)]
    if missing:
        raise ConfigurationError(f"{where}: {' and '.join(missing)} is missing; write them as arguments.")
    for argument in arguments:
        if PLACES[0] in argument and len(argument.split()) > 1:
            raise ConfigurationError(
                f"{where}: in {argument[:80]!r} the name of a checkpoint could run commands; "
                f'write {PLACES[0]} as a separate argument, which a script reads as "$1".'
            )


def fill_places(argument: str, values: Iterable[str]) -> str:
    """An argument with PLACES replaced by values, in order."""
    by_place = dict(zip(PLACES, values, strict=True))
    return re.sub("|".join(map(re.escape, PLACES)), lambda match: by_place[match[0]], argument)


def read_scores(output: bytes) -> Scores:
    """The scores in JSON lines: a number or `{"score": number}` per prompt, or one `{"mean": ..., "stderr": ...}`."""
    if len(output) > MAX_OUTPUT_BYTES:
        raise EvaluationFailed(f"the output has more than {MAX_OUTPUT_BYTES} bytes")
    scores: list[float] = []
    for number, line in enumerate(output.splitlines(), 1):
        if not line.strip():
            continue
        try:
            document = json.loads(line)
            if isinstance(document, dict) and "mean" in document:
                return Summary(float(document["mean"]), float(document["stderr"]))
            scores.append(float(document["score"] if isinstance(document, dict) else document))
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            raise EvaluationFailed(f"line {number} of the output is not a score: {line[:80]!r}") from None
        if len(scores) > MAX_SCORES:
            raise EvaluationFailed(f"the output has more than {MAX_SCORES} scores")
    return scores


def read_logged_scores(log: bytes) -> Scores:
    """The scores in a log, which may have other lines: objects with `score`, or one with `mean` and `stderr`."""
    if len(log) > MAX_OUTPUT_BYTES:
        raise EvaluationFailed(f"the log has more than {MAX_OUTPUT_BYTES} bytes")
    lines = [line for line in log.splitlines() if _is_score(line)]
    if not lines:
        raise EvaluationFailed('the log has no line {"score": number} or {"mean": number, "stderr": number}')
    return read_scores(b"\n".join(lines))


def _is_score(line: bytes) -> bool:
    try:
        document = json.loads(line) if line.lstrip().startswith(b"{") else None
    except (ValueError, RecursionError):
        return False
    return isinstance(document, dict) and ("score" in document or "mean" in document)


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
