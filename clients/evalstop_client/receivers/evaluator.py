"""`evalstop-receiver evaluator`: evaluates checkpoints on request, with a command that prints their scores.

It stores nothing: a request stays open until it is answered, so a restarted evaluator starts over, and of two
evaluators of one project the first answer stands.
"""

from __future__ import annotations

import argparse
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
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from urllib.parse import quote, unquote

from evalstop_client.errors import ConfigurationError, EvalStopError
from evalstop_client.eval_request import Difference, Scores, Summary, compare_scores
from evalstop_client.receivers.stop.processes import copy_environment, exit_on_signals
from evalstop_client.receivers.stop.receiver import add_seconds, add_url_options, parse_service, read_answers
from evalstop_client.service import Accepted, Json, Refused, Service, seconds_after

logger = logging.getLogger("evalstop_client.receivers")

MOST_REQUESTS = 200
"""Maximum number of requests that the service returns."""

TRIES = 3
PLACES = ("{checkpoint}", "{n}", "{seed}")
URI = re.compile(r"[A-Za-z0-9_/.][\x21-\x7e]{0,4095}", re.ASCII)
ENCODED_SEPARATOR = re.compile("%(?:2e|2f|5c)", re.IGNORECASE)


class EvaluationFailed(EvalStopError):
    """A checkpoint could not be evaluated."""


class Evaluator:
    """Answers requests of the service."""

    def __init__(self, service: Service, options: argparse.Namespace, environment: dict[str, str]) -> None:
        self._service = service
        self._options = options
        self._environment = environment
        self._failures: Counter[str] = Counter()

    def run(self) -> None:
        asked = partial(self._service.get, f"/eval-requests?limit={MOST_REQUESTS}")
        for body in read_answers(asked, threading.Event(), "requests"):
            items = body.get("items")
            for item in items if isinstance(items, list) else []:
                self._process_request(item)
            time.sleep(max(0.05, self._options.poll_seconds))

    def _process_request(self, item: Json) -> None:
        """Evaluate and report, unless there is no current checkpoint yet, or it failed too often."""
        try:
            if item["current_checkpoint"] is None:
                return
            request_id, run_id, seed = str(item["id"]), str(item["run_id"]), int(item["seed"])
            uris = [str(item[which]["uri"]) for which in ("best_checkpoint", "current_checkpoint")]
            prompts = self._options.prompts * int(item["multiplier"])
        except (KeyError, TypeError, ValueError) as error:
            logger.error("the service returned a malformed request: %s %s", type(error).__name__, error)
            return
        if self._failures[request_id] >= TRIES:
            return
        try:
            best, current = (self._evaluate(uri, prompts, seed) for uri in uris)
            difference = compare_scores(best, current)
        except (EvaluationFailed, ValueError) as error:
            self._failures[request_id] += 1
            logger.error("request %s, try %d of %d: %s", request_id, self._failures[request_id], TRIES, error)
            return
        self._report_difference(run_id, request_id, difference)

    def _evaluate(self, uri: str, prompts: int, seed: int) -> Scores:
        command = fill_command(self._options.command, uri, prompts, seed, self._options.prefix)
        return evaluate(command, self._environment, self._options.timeout_seconds)

    def _report_difference(self, run_id: str, request_id: str, difference: Difference) -> None:
        """Repeat the answer until the service has accepted or refused it."""
        path = f"/runs/{quote(run_id, safe='')}/eval-requests/{quote(request_id, safe='')}/answer"
        tries = 0
        while True:
            answer = self._service.post(path, difference._asdict())
            if isinstance(answer, Accepted):
                text = "request %s is answered: the difference is %g, its standard error %g"
                logger.info(text, request_id, difference.difference, difference.stderr)
                return
            if isinstance(answer, Refused):
                logger.warning("the service does not accept the answer: %s", answer.reason)
                return
            tries += 1
            time.sleep(seconds_after(answer, tries))


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


def check_places(arguments: Sequence[str]) -> None:
    """Raise ConfigurationError unless all of PLACES are in the arguments, and the checkpoint is not part of a
    script."""
    missing = [placeholder for placeholder in PLACES if not any(placeholder in argument for argument in arguments)]
    if missing:
        raise ConfigurationError(f"command: {' and '.join(missing)} is missing; write them as arguments.")
    for argument in arguments:
        if PLACES[0] in argument and len(argument.split()) > 1:
            raise ConfigurationError(
                f"command: in {argument[:80]!r} the name of a checkpoint could run commands; "
                f'write {PLACES[0]} as a separate argument, which a script reads as "$1".'
            )


def fill_command(command: Sequence[str], uri: str, prompts: int, seed: int, prefixes: Sequence[str]) -> list[str]:
    """The command for a checkpoint; raises EvaluationFailed if it may not be loaded."""
    check_uri(uri, prefixes)
    return [_fill_places(argument, (uri, str(prompts), str(seed))) for argument in command]


def _fill_places(argument: str, values: Iterable[str]) -> str:
    by_place = dict(zip(PLACES, values, strict=True))
    return re.sub("|".join(map(re.escape, PLACES)), lambda match: by_place[match[0]], argument)


def evaluate(command: Sequence[str], environment: dict[str, str], timeout_seconds: float) -> Scores:
    """Run the program in a process group of its own, of which nothing is left, and read its scores; raises
    EvaluationFailed."""
    with tempfile.TemporaryFile() as output:  # a pipe would end with the last child that has it
        try:
            process = subprocess.Popen(  # noqa: S603  # a vector that was checked, and no shell
                list(command), stdin=subprocess.DEVNULL, stdout=output, env=environment, start_new_session=True
            )
        except OSError as error:
            raise EvaluationFailed(f"{command[0]} cannot be run: {error}") from None
        try:
            process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            raise EvaluationFailed(f"{command[0]} did not end within {timeout_seconds:g} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # such as a model server that it started
            process.wait()
        if process.returncode != 0:
            raise EvaluationFailed(f"{command[0]} ended with {process.returncode}")
        output.seek(0)
        return read_scores(output.read().decode(errors="replace"))


def read_scores(output: str) -> Scores:
    """The scores in JSON lines: a number or `{"score": number}` per prompt, or one `{"mean": ..., "stderr": ...}`."""
    scores: list[float] = []
    for number, line in enumerate(output.split("\n"), 1):
        if not line.strip():
            continue
        try:
            document = json.loads(line)
            if isinstance(document, dict) and "mean" in document:
                return Summary(float(document["mean"]), float(document["stderr"]))
            scores.append(float(document["score"] if isinstance(document, dict) else document))
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            raise EvaluationFailed(f"line {number} of the output is not a score: {line[:80]!r}") from None
    return scores


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--prompts",
        type=int,
        required=True,
        metavar="N",
        help="number in a usual eval; a request asks for a multiple of it",
    )
    add("--prefix", action="append", required=True, metavar="URI", help="prefix of checkpoint URIs that may be loaded")
    add_seconds(parser, "--timeout-seconds", 3600.0, "timeout of each evaluation")
    add_seconds(parser, "--poll-seconds", 10.0, "between two polls")
    add_url_options(parser, "report")
    add("command", nargs="+", metavar="COMMAND", help="command with {checkpoint}, {n} and {seed} in its arguments")


def run(options: argparse.Namespace) -> int:
    """Answer requests until SIGTERM or SIGINT."""
    url, key = parse_service(options)
    if options.prompts < 1:
        raise ConfigurationError(f"--prompts {options.prompts}: it must be positive.")
    check_places(options.command[1:])
    exit_on_signals()  # whatever it was doing, the next evaluator does again
    Evaluator(Service(url, key), options, copy_environment(options.key_env)).run()
    return 0
