"""A paired evaluation of two checkpoints: the request, the checkpoints that may be loaded, the output of programs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from evalstop_client.errors import ConfigurationError, EvalStopError
from evalstop_client.eval_request import Scores, Summary

MAX_OUTPUT_BYTES = 16 * 2**20
MAX_SCORES = 1_000_000
PLACES = ("{checkpoint}", "{n}", "{seed}")
URI = re.compile(r"[A-Za-z0-9_/.][\x21-\x7e]{0,4095}", re.ASCII)


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
    if not URI.fullmatch(uri) or ".." in uri or not uri.startswith(tuple(prefixes)):
        raise EvaluationFailed(f"the checkpoint {uri[:200]!r} does not begin with {' or '.join(prefixes)}")


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
