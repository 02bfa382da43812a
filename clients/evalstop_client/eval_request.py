"""Requests to evaluate now: the best checkpoint and the current one, on the same prompts."""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

logger = logging.getLogger("evalstop_client")


class Summary(NamedTuple):
    """A mean score and its standard error, when the scores per prompt are not available."""

    mean: float
    stderr: float


Scores = Sequence[float] | Summary
"""An evaluation: one score per prompt, or their mean and its standard error."""

Evaluate = Callable[[str, int, int], Scores]
"""Evaluates a checkpoint: takes its uri, a multiple of the usual number of prompts, and the seed to draw them."""


class Difference(NamedTuple):
    """The current score minus the best one's, in the unit of the eval metric; `prompts` is None if unknown."""

    difference: float
    stderr: float
    prompts: int | None = None


def compare_scores(best: Scores, current: Scores) -> Difference:
    """The difference of two evaluations; raises ValueError.

    Scores per prompt, in the same order, are compared prompt by prompt: the differences spread less than the scores.
    The errors of two summaries are treated as independent, which overestimates the error of the difference.

    >>> compare_scores([0.4, 0.9, 0.7], [0.3, 0.8, 0.7]).prompts
    3
    """
    try:
        difference = _subtract(best, current)
    except OverflowError as error:
        raise ValueError(f"some scores are too large: {error}") from None
    if not math.isfinite(difference.difference) or not 0 <= difference.stderr < math.inf:
        raise ValueError(
            f"a difference of {difference.difference} with a standard error of {difference.stderr} is no answer"
        )
    return difference


def _subtract(best: Scores, current: Scores) -> Difference:
    if isinstance(best, Summary) and isinstance(current, Summary):
        # Numbers of numpy and torch are not JSON.
        return Difference(float(current.mean - best.mean), math.hypot(best.stderr, current.stderr))
    if isinstance(best, Summary) or isinstance(current, Summary):
        raise ValueError("one evaluation has scores per prompt and the other a mean; use the same form for both")
    if len(best) != len(current) or len(best) < 2:
        raise ValueError(f"{len(best)} and {len(current)} scores; at least two are required, of the same prompts")
    changes = [float(b) - float(a) for a, b in zip(best, current, strict=True)]
    if not all(map(math.isfinite, changes)):
        raise ValueError("some scores are not finite; leave these prompts out of both evaluations")
    stderr = statistics.stdev(changes) / math.sqrt(len(changes))
    return Difference(statistics.fmean(changes), stderr, len(changes))


@dataclass(frozen=True)
class EvalRequest:
    """A paired evaluation that the service requests.

    Evaluate the checkpoint at `best_uri` and the current model on the same prompts: `multiplier` times as many as
    usual, drawn with `seed`. `step`: the step of the request.
    """

    id: str
    step: int
    best_step: int
    best_uri: str
    multiplier: int
    seed: int
    _send: Callable[[str, Mapping[str, Any]], None] = field(repr=False, compare=False)

    def answer(self, *, best: Scores, current: Scores) -> None:
        """Report both evaluations: scores per prompt in the same order, or a `Summary` each. Raises ValueError."""
        self._send(self.id, compare_scores(best, current)._asdict())

    @classmethod
    def from_json(cls, fields: Mapping[str, Any], send: Callable[[str, Mapping[str, Any]], None]) -> EvalRequest | None:
        """Parse the request from the service's JSON; None if it is malformed."""
        try:
            best = fields["best_checkpoint"]
            numbers = (int(fields["step"]), int(best["step"]))
            return cls(
                str(fields["id"]), *numbers, str(best["uri"]), int(fields["multiplier"]), int(fields["seed"]), send
            )
        except (KeyError, TypeError, ValueError):
            return None


def answer_requests(requests: Iterable[EvalRequest], evaluate: Evaluate, current_uri: str, step: int) -> None:
    """Answer the requests up to this step, with the checkpoint that was saved there.

    An evaluation that fails is logged: it must not end the training.
    """
    for request in requests:
        if request.step > step:
            continue
        try:
            best, current = (evaluate(uri, request.multiplier, request.seed) for uri in (request.best_uri, current_uri))
            request.answer(best=best, current=current)
        except Exception:
            logger.exception("evalstop: the evaluation requested at step %d failed", request.step)
