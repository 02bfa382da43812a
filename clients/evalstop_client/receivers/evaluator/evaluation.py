"""A paired evaluation of two checkpoints: what is asked for, which checkpoints may be loaded, what a program prints."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from evalstop_client.errors import ConfigurationError, EvalStopError
from evalstop_client.eval_request import Difference, Scores, Summary

MAX_OUTPUT_BYTES = 16 * 2**20
MAX_SCORES = 1_000_000
PLACES = ("{checkpoint}", "{n}", "{seed}")
URI = re.compile(r"[A-Za-z0-9_/.][\x21-\x7e]{0,4095}", re.ASCII)


class EvaluationFailed(EvalStopError):
    """A checkpoint could not be evaluated."""


@dataclass(frozen=True)
class PairedRequest:
    """A request of the service: both checkpoints on the same prompts, drawn by `seed`."""

    id: str
    run_id: str
    best_uri: str
    current_uri: str
    prompts: int
    seed: int


class Evaluation(Protocol):
    """A way to evaluate both checkpoints of a request."""

    @property
    def tries(self) -> int:
        """How often a request may fail before it is given up."""
        ...

    def compare(self, request: PairedRequest) -> Difference | None:
        """The difference; None while it is being evaluated, and it is asked again later.

        Raises EvaluationFailed or ValueError when there is none, SchedulerError to be asked again.
        """
        ...


def check_uri(uri: str, prefixes: Sequence[str]) -> None:
    """Raise EvaluationFailed for a checkpoint that may not be loaded.

    Whoever may report a run names its checkpoints, and to load one may be to run code that is in it.
    """
    if not URI.fullmatch(uri) or ".." in uri or not uri.startswith(tuple(prefixes)):
        raise EvaluationFailed(f"the checkpoint {uri[:200]!r} does not begin with {' or '.join(prefixes)}")


def check_places(where: str, arguments: Sequence[str]) -> None:
    """Raise ConfigurationError unless all of PLACES are in the arguments, the checkpoint not within a script."""
    missing = [place for place in PLACES if not any(place in argument for argument in arguments)]
    if missing:
        raise ConfigurationError(f"{where}: {' and '.join(missing)} is missing; write them as arguments.")
    for argument in arguments:
        if PLACES[0] in argument and len(argument.split()) > 1:
            raise ConfigurationError(
                f"{where}: in {argument[:80]!r} the name of a checkpoint could run commands; "
                f'write {PLACES[0]} as an argument of its own, which a script reads as "$1".'
            )


def fill_places(argument: str, values: Iterable[str]) -> str:
    """An argument with PLACES replaced, by values in their order."""
    by_place = dict(zip(PLACES, values, strict=True))
    return re.sub("|".join(map(re.escape, PLACES)), lambda match: by_place[match[0]], argument)


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


def read_logged_scores(log: bytes) -> Scores:
    """The scores in a log, which may have other lines too: objects with `score`, or one with `mean` and `stderr`."""
    if len(log) > MAX_OUTPUT_BYTES:
        raise EvaluationFailed(f"the log has more than {MAX_OUTPUT_BYTES} bytes")
    lines = [line for line in log.splitlines() if _is_score(line)]
    if not lines:
        raise EvaluationFailed('the log has no line {"score": number} or {"mean": number, "stderr": number}')
    return read_scores(b"\n".join(lines))


def _is_score(line: bytes) -> bool:
    try:
        said = json.loads(line) if line.lstrip().startswith(b"{") else None
    except (ValueError, RecursionError):
        return False
    return isinstance(said, dict) and ("score" in said or "mean" in said)
