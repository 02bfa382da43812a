"""Scores verdicts against the truth. All functions are pure, and each figure has a 95 % interval.

Read the figures together. Recall means nothing without false stops. The median delay is over right stops only, so a
rule that finds only the easy turns looks fast. Ambiguous runs are counted but enter no other figure.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

import numpy as np

from evalstop_lab.worlds.truth import Floats, Label, Truth

CONFIDENCE = 0.95
CLIFF_EVALS, CLIFF_SHARE, CLIFF_WAIT = 3, 0.6, 6


@dataclass(frozen=True)
class Outcome:
    """The result of a rule on one run: the step of its stop (None: not stopped) and of the kept checkpoint."""

    stop_step: int | None
    best_step: int | None = None


class OutcomeKind(StrEnum):
    """Whether a rule was right about a run.

    `at_the_end`: a stop at the last eval or later, which saves nothing; it is neither right nor wrong.
    """

    RIGHT = "right"
    PREMATURE = "premature"
    MISSED = "missed"
    FALSE_STOP = "false_stop"
    LEFT_ALONE = "left_alone"
    AT_THE_END = "at_the_end"
    AMBIGUOUS = "ambiguous"


@dataclass(frozen=True)
class Figure:
    """A quantile, mean or share of `n` numbers or runs with its interval; NaN if `n` is 0."""

    value: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class Share(Figure):
    """The share `hits` / `n` with its interval; if `n` is 0, the value is NaN and the interval [0, 1]."""

    hits: int


@dataclass(frozen=True)
class Score:
    """The figures of a rule over runs.

    `cliffs`: the share of sudden falls after which it stopped in time. `saved`: the share of the evals after the peaks
    that was saved. `eval_lost`: the mean difference between best and kept checkpoint, as a share of the run's unit.
    """

    recall: Share
    false_stops: Share
    premature: Share
    cliffs: Share
    delay: Figure
    saved: Figure
    eval_lost: Figure


def classify_outcome(outcome: Outcome, truth: Truth) -> OutcomeKind:
    """Classify the outcome; a stop at the peak is right, one before it is premature and counts as wrong."""
    if truth.label is Label.AMBIGUOUS:
        return OutcomeKind.AMBIGUOUS
    hacking = truth.label is Label.HACKING
    if outcome.stop_step is None:
        return OutcomeKind.MISSED if hacking else OutcomeKind.LEFT_ALONE
    if outcome.stop_step >= truth.steps[-1]:
        return OutcomeKind.AT_THE_END
    if not hacking:
        return OutcomeKind.FALSE_STOP
    return OutcomeKind.RIGHT if outcome.stop_step >= truth.peak_step else OutcomeKind.PREMATURE


def compute_delay(outcome: Outcome, truth: Truth) -> int | None:
    """The number of evals between the peak and a right stop; None if there was none."""
    if outcome.stop_step is None or classify_outcome(outcome, truth) is not OutcomeKind.RIGHT:
        return None
    return int(np.searchsorted(truth.steps, outcome.stop_step)) - truth.peak


def compute_eval_loss(outcome: Outcome, truth: Truth) -> float | None:
    """The noiseless eval score of the best checkpoint minus that of the kept one, as a share of the run's unit.

    None if no checkpoint was kept, or if the kept step is not an eval of the run.
    """
    if outcome.best_step is None:
        return None
    index = int(np.searchsorted(truth.steps, outcome.best_step))
    if index == len(truth.steps) or truth.steps[index] != outcome.best_step:
        return None
    return float((truth.eval_scores.max() - truth.eval_scores[index]) / truth.unit)


def score_outcomes(pairs: Iterable[tuple[Outcome, Truth]]) -> Score:
    """Compute all figures over these runs."""
    pairs = list(pairs)
    counts = Counter(classify_outcome(outcome, truth) for outcome, truth in pairs)
    hacking = sum(truth.label is Label.HACKING for _, truth in pairs)
    healthy = sum(truth.label is Label.HEALTHY for _, truth in pairs)
    delays = [float(d) for d in (compute_delay(o, t) for o, t in pairs) if d is not None]
    return Score(
        recall=wilson(counts[OutcomeKind.RIGHT], hacking),
        false_stops=clopper_pearson(counts[OutcomeKind.FALSE_STOP], healthy),
        premature=wilson(counts[OutcomeKind.PREMATURE], hacking),
        cliffs=score_cliffs(pairs),
        delay=estimate_quantile(delays, 0.5),
        saved=_estimate_saved(pairs),
        eval_lost=estimate_mean([lost for o, t in pairs if (lost := compute_eval_loss(o, t)) is not None]),
    )


def _estimate_saved(pairs: Sequence[tuple[Outcome, Truth]]) -> Figure:
    """The share of the evals after the peaks of turned runs that was saved, minus the evals lost by wrong stops.

    Each run has the same weight. A stop before the peak or of a healthy run loses the evals that were run.
    """
    saved, possible = [], []
    for outcome, truth in pairs:
        kind, last = classify_outcome(outcome, truth), len(truth.steps) - 1
        if kind is OutcomeKind.AMBIGUOUS:
            continue
        possible.append(1 - truth.peak / last if truth.label is Label.HACKING else 0.0)
        at = 0.0 if outcome.stop_step is None else float(np.searchsorted(truth.steps, outcome.stop_step)) / last
        saved.append(
            {OutcomeKind.RIGHT: 1 - at, OutcomeKind.PREMATURE: -at, OutcomeKind.FALSE_STOP: -at}.get(kind, 0.0)
        )
    most = float(np.mean(possible)) if possible else math.nan
    return estimate_mean([value / most for value in saved] if most else [])


def find_cliff(truth: Truth) -> int | None:
    """The first eval of a fall within `CLIFF_EVALS` evals that makes up most of what a turned run lost; else None."""
    after = truth.eval_scores[truth.peak :]
    reach = min(CLIFF_EVALS, len(after) - 1)
    if truth.label is not Label.HACKING:
        return None
    falls = after[:-reach] - after[reach:]
    start = int(np.argmax(falls))
    if falls[start] < CLIFF_SHARE * truth.drop:
        return None
    fallen = after[start] - after[start : start + reach + 1] >= falls[start] / 2
    return truth.peak + start + int(np.argmax(fallen))


def score_cliffs(pairs: Iterable[tuple[Outcome, Truth]]) -> Share:
    """The share of cliffs after which the run was stopped within `CLIFF_WAIT` evals, of those with as many before the
    last."""
    hits = n = 0
    for outcome, truth in pairs:
        cliff = find_cliff(truth)
        if cliff is None or cliff + CLIFF_WAIT > len(truth.steps) - 1:
            continue
        n += 1
        if classify_outcome(outcome, truth) is OutcomeKind.RIGHT and outcome.stop_step is not None:
            hits += int(outcome.stop_step <= truth.steps[cliff + CLIFF_WAIT - 1])
    return wilson(hits, n)


def wilson(hits: int, n: int) -> Share:
    return _estimate_share(hits, n, "wilson")


def clopper_pearson(hits: int, n: int) -> Share:
    """A share with the exact interval of Clopper and Pearson, which covers at least as often as stated."""
    return _estimate_share(hits, n, "exact")


@lru_cache(maxsize=10_000)  # SciPy takes milliseconds, and the same counts recur from threshold to threshold
def _estimate_share(hits: int, n: int, method: str) -> Share:
    if n == 0:
        return Share(math.nan, 0.0, 1.0, 0, 0)
    from scipy import stats  # most of a second, which commands without figures need not wait

    interval = stats.binomtest(hits, n).proportion_ci(CONFIDENCE, method)
    return Share(hits / n, float(interval.low), float(interval.high), n, hits)


def estimate_quantile(numbers: Sequence[float], q: float) -> Figure:
    """The q-quantile with its interval; all three are order statistics, so numbers may be infinite."""
    n = len(numbers)
    if n == 0:
        return Figure(math.nan, math.nan, math.nan, 0)
    ordered = sorted(numbers)
    low, high = find_quantile_ranks(n, q)
    return Figure(ordered[max(math.ceil(q * n) - 1, 0)], ordered[low], ordered[high], n)


def find_quantile_ranks(n: int, q: float) -> tuple[int, int]:
    """The ranks, from 0, of the order statistics that bound the q-quantile, limited to existing ranks."""
    from scipy import stats

    tail = (1 - CONFIDENCE) / 2
    low = int(stats.binom.ppf(tail, n, q)) - 1
    high = int(stats.binom.ppf(1 - tail, n, q))
    return min(max(low, 0), n - 1), min(max(high, 0), n - 1)


def estimate_mean(numbers: Sequence[float] | Floats) -> Figure:
    """The mean with Student's interval, which is NaN for a single number.

    A bootstrap is too narrow for few numbers: with four it covers the mean in 79 % of cases instead of 95 %.
    """
    values = np.asarray(numbers, dtype=float)
    count = len(values)
    mean = float(values.mean()) if count else math.nan
    if count < 2:
        return Figure(mean, math.nan, math.nan, count)
    from scipy import stats

    reach = float(stats.t.ppf((1 + CONFIDENCE) / 2, count - 1) * values.std(ddof=1) / math.sqrt(count))
    return Figure(mean, mean - reach, mean + reach, count)
