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
    """A score's mean and its standard error, where scores by prompt are not at hand."""

    mean: float
    stderr: float


Scores = Sequence[float] | Summary
"""An evaluation: a score a prompt, or their mean and its standard error."""

Evaluate = Callable[[str, int, int], Scores]
"""Evaluates a checkpoint (its uri) on so many times the usual prompts, drawn by a seed."""


class Difference(NamedTuple):
    """The current score less the best one's, in the unit of the eval metric; `prompts` is None where nobody counted."""

    difference: float
    stderr: float
    prompts: int | None = None


def compare_scores(best: Scores, current: Scores) -> Difference:
    """The difference of two evaluations; raises ValueError.

    Of scores by prompt, in the same order, the prompts' own differences count: their spread is smaller than that of
    the scores. Of two summaries the errors count as independent, which is more than they are.

    >>> compare_scores([0.4, 0.9, 0.7], [0.3, 0.8, 0.7]).prompts
    3
    """
    if isinstance(best, Summary) and isinstance(current, Summary):
        found = Difference(current.mean - best.mean, math.hypot(best.stderr, current.stderr))
    elif isinstance(best, Summary) or isinstance(current, Summary):
        raise ValueError("one evaluation has scores by prompt and the other a mean; give both alike")
    else:
        if len(best) != len(current) or len(best) < 2:
            raise ValueError(f"{len(best)} and {len(current)} scores; two or more are needed, of the same prompts")
        changes = [float(b) - float(a) for a, b in zip(best, current, strict=True)]
        if not all(map(math.isfinite, changes)):
            raise ValueError("scores that are not finite; leave these prompts out of both evaluations")
        stderr = statistics.stdev(changes) / math.sqrt(len(changes))
        found = Difference(statistics.fmean(changes), stderr, len(changes))
    if not math.isfinite(found.difference) or not 0 <= found.stderr < math.inf:
        raise ValueError(f"a difference of {found.difference} with a standard error of {found.stderr} is no answer")
    return found


@dataclass(frozen=True)
class EvalRequest:
    """A paired evaluation that the service asks for.

    Evaluate the checkpoint at `best_uri`, and the model as it is now, on the same `multiplier` times as many prompts as
    usual, drawn by `seed`. `step` is where it was asked for.
    """

    id: str
    step: int
    best_step: int
    best_uri: str
    multiplier: int
    seed: int
    _send: Callable[[str, Mapping[str, Any]], None] = field(repr=False, compare=False)

    def answer(self, *, best: Scores, current: Scores) -> None:
        """Report both evaluations: scores by prompt in the same order, or a `Summary` each. Raises ValueError."""
        self._send(self.id, compare_scores(best, current)._asdict())

    @classmethod
    def from_json(cls, fields: Mapping[str, Any], send: Callable[[str, Mapping[str, Any]], None]) -> EvalRequest | None:
        """The request in the service's JSON; None where it is not understood."""
        try:
            best = fields["best_checkpoint"]
            numbers = (int(fields["step"]), int(best["step"]))
            return cls(
                str(fields["id"]), *numbers, str(best["uri"]), int(fields["multiplier"]), int(fields["seed"]), send
            )
        except (KeyError, TypeError, ValueError):
            return None


def answer_requests(requests: Iterable[EvalRequest], evaluate: Evaluate, current_uri: str, step: int) -> None:
    """Answer those that were asked for up to this step, with the checkpoint that was saved there.

    An evaluation that fails is logged: it must not end the training.
    """
    for request in requests:
        if request.step > step:
            continue
        try:
            best, current = (evaluate(uri, request.multiplier, request.seed) for uri in (request.best_uri, current_uri))
            request.answer(best=best, current=current)
        except Exception:
            logger.exception("evalstop: the evaluation that was asked for at step %d failed", request.step)
