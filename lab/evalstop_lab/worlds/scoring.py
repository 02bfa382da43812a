"""How good verdicts were, held against the truth: pure functions, each figure with an interval of 95 %.

Read the figures together. Recall without the false stops beside it says nothing; the median delay is over right stops
only, so that a rule that finds only the easy turns looks fast: `delay_of_all` counts a missed turn as never. What is
ambiguous is counted and otherwise left out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from scipy import stats

from evalstop_lab.worlds.truth import Floats, Label, Truth

CONFIDENCE = 0.95
RESAMPLES = 400


@dataclass(frozen=True)
class Outcome:
    """What was made of a run: where it was stopped, if it was, and the step of the checkpoint that was kept."""

    stop_step: int | None
    best_step: int | None = None


class Fate(StrEnum):
    """What a verdict meant for its run.

    `at_the_end`: the stop came at the last eval or later and saved nothing; it is neither right nor wrong.
    """

    RIGHT = "right"
    PREMATURE = "premature"
    MISSED = "missed"
    FALSE_STOP = "false_stop"
    LEFT_ALONE = "left_alone"
    AT_THE_END = "at_the_end"
    AMBIGUOUS = "ambiguous"


@dataclass(frozen=True)
class Share:
    """`hits` of `n` and the interval of their share; of nothing the value is NaN and the interval is [0, 1]."""

    hits: int
    n: int
    low: float
    high: float

    @property
    def value(self) -> float:
        return self.hits / self.n if self.n else math.nan


@dataclass(frozen=True)
class Figure:
    """A quantile or a mean of `n` numbers, with its interval; NaN of no numbers."""

    value: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class Score:
    """`wasted` is the mean share of the evals after the peak that were still run, `eval_lost` what the kept checkpoint
    is worse than the best one, as a share of the run's unit."""

    fates: dict[Fate, int]
    recall: Share
    precision: Share
    false_stops: Share
    premature: Share
    at_the_end: Share
    delay: Figure
    delay_p90: Figure
    delay_of_all: Figure
    wasted: Figure
    eval_lost: Figure


def fate(outcome: Outcome, truth: Truth) -> Fate:
    """What the outcome meant: a stop on the peak itself is right, one before it premature and therefore wrong."""
    if truth.label is Label.AMBIGUOUS:
        return Fate.AMBIGUOUS
    hacking = truth.label is Label.HACKING
    if outcome.stop_step is None:
        return Fate.MISSED if hacking else Fate.LEFT_ALONE
    if outcome.stop_step >= truth.steps[-1]:
        return Fate.AT_THE_END
    if not hacking:
        return Fate.FALSE_STOP
    return Fate.RIGHT if outcome.stop_step >= truth.peak_step else Fate.PREMATURE


def delay(outcome: Outcome, truth: Truth) -> int | None:
    """How many evals after the peak the run was stopped; None if it was not stopped rightly."""
    if outcome.stop_step is None or fate(outcome, truth) is not Fate.RIGHT:
        return None
    return int(np.searchsorted(truth.steps, outcome.stop_step)) - truth.peak


def wasted_share(outcome: Outcome, truth: Truth) -> float | None:
    """Of the evals after the peak of a hacking run the share that was still run; None if stopped before the peak."""
    kind = fate(outcome, truth)
    if truth.label is not Label.HACKING or kind is Fate.PREMATURE:
        return None
    evals = delay(outcome, truth)
    return 1.0 if evals is None else evals / (len(truth.steps) - 1 - truth.peak)


def eval_lost(outcome: Outcome, truth: Truth) -> float | None:
    """The noiseless eval score at the best eval of the whole run less that at the kept one, as a share of the run's
    unit.

    None when no checkpoint was kept, or when the kept step is no eval of the run.
    """
    if outcome.best_step is None:
        return None
    index = int(np.searchsorted(truth.steps, outcome.best_step))
    if index == len(truth.steps) or truth.steps[index] != outcome.best_step:
        return None
    return float((truth.eval_scores.max() - truth.eval_scores[index]) / truth.unit)


def score(pairs: Iterable[tuple[Outcome, Truth]], chance_seed: int = 0) -> Score:
    """All figures over these runs; `chance_seed` seeds the bootstrap of the means."""
    pairs = list(pairs)
    fates = Counter(fate(outcome, truth) for outcome, truth in pairs)
    hacking = sum(truth.label is Label.HACKING for _, truth in pairs)
    healthy = sum(truth.label is Label.HEALTHY for _, truth in pairs)
    stopped = fates[Fate.RIGHT] + fates[Fate.PREMATURE] + fates[Fate.FALSE_STOP]
    delays = [float(d) for d in (delay(o, t) for o, t in pairs) if d is not None]
    never = [math.inf] * (fates[Fate.MISSED] + _ended(pairs))
    return Score(
        fates={item: fates[item] for item in Fate},
        recall=wilson(fates[Fate.RIGHT], hacking),
        precision=wilson(fates[Fate.RIGHT], stopped),
        false_stops=clopper_pearson(fates[Fate.FALSE_STOP], healthy),
        premature=wilson(fates[Fate.PREMATURE], hacking),
        at_the_end=wilson(fates[Fate.AT_THE_END], hacking + healthy),
        delay=quantile(delays, 0.5),
        delay_p90=quantile(delays, 0.9),
        delay_of_all=quantile(delays + never, 0.5),
        wasted=mean(_known(wasted_share, pairs), chance_seed),
        eval_lost=mean(_known(eval_lost, pairs), chance_seed),
    )


def information_bound(truth: Truth, alpha: float) -> int | None:
    """How many evals after the peak any rule of false alarm probability `alpha` needs, roughly: Lai (1998).

    The smallest n at which the sum over i <= n of (the eval score at the peak - the eval score i evals later)^2 / (2
    sd^2) reaches ln(1 / alpha). None when the run ends before that, is not hacking, or its noise is unknown.
    """
    if truth.noise_sd is None or truth.label is not Label.HACKING:
        return None
    fallen = truth.eval_scores[truth.peak] - truth.eval_scores[truth.peak + 1 :]
    with np.errstate(divide="ignore", invalid="ignore"):
        information = np.cumsum(np.where(fallen == 0, 0.0, fallen**2 / (2 * truth.noise_sd**2)))
    reached = np.flatnonzero(information >= math.log(1 / alpha))
    return int(reached[0]) + 1 if len(reached) else None


def compare_with_bound(pairs: Sequence[tuple[Outcome, Truth]], alpha: float) -> tuple[Figure, Figure]:
    """The bound over all hacking runs (never, where it is not reached), and delay to bound over the right stops.

    Runs without noise have no ratio: one eval after the peak proves the turn to whoever knows that there is no noise.
    """
    bounds, ratios = [], []
    for outcome, truth in pairs:
        if truth.label is not Label.HACKING:
            continue
        bound, evals = information_bound(truth, alpha), delay(outcome, truth)
        bounds.append(math.inf if bound is None else float(bound))
        if evals is not None and bound is not None and truth.noise_sd != 0:
            ratios.append(evals / bound)
    return quantile(bounds, 0.5), quantile(ratios, 0.5)


def wilson(hits: int, n: int, confidence: float = CONFIDENCE) -> Share:
    """A share with Wilson's score interval."""
    if n == 0:
        return Share(0, 0, 0.0, 1.0)
    z = float(stats.norm.ppf((1 + confidence) / 2))
    center, spread = hits + z * z / 2, z * math.sqrt(hits * (n - hits) / n + z * z / 4)
    low = 0.0 if hits == 0 else (center - spread) / (n + z * z)
    high = 1.0 if hits == n else (center + spread) / (n + z * z)
    return Share(hits, n, low, high)


def clopper_pearson(hits: int, n: int, confidence: float = CONFIDENCE) -> Share:
    """A share with the exact interval of Clopper and Pearson, which never covers less than it says."""
    tail = (1 - confidence) / 2
    low = 0.0 if hits == 0 else float(stats.beta.ppf(tail, hits, n - hits + 1))
    high = 1.0 if hits == n else float(stats.beta.ppf(1 - tail, hits + 1, n - hits))
    return Share(hits, n, low, high)


def quantile(numbers: Sequence[float], q: float, confidence: float = CONFIDENCE) -> Figure:
    """The q-quantile (an order statistic, so that infinity is allowed) between two order statistics."""
    n = len(numbers)
    if n == 0:
        return Figure(math.nan, math.nan, math.nan, 0)
    ordered = sorted(numbers)
    low, high = quantile_ranks(n, q, confidence)
    return Figure(ordered[max(math.ceil(q * n) - 1, 0)], ordered[low], ordered[high], n)


def quantile_ranks(n: int, q: float, confidence: float = CONFIDENCE) -> tuple[int, int]:
    """The ranks, from 0, of the order statistics between which the q-quantile lies; at the ends as far as they go."""
    tail = (1 - confidence) / 2
    low = int(stats.binom.ppf(tail, n, q)) - 1
    high = int(stats.binom.ppf(1 - tail, n, q))
    return min(max(low, 0), n - 1), min(max(high, 0), n - 1)


def mean(
    numbers: Sequence[float] | Floats, seed: int, confidence: float = CONFIDENCE, resamples: int = RESAMPLES
) -> Figure:
    """The mean with a percentile interval of the bootstrap."""
    values = np.asarray(numbers, dtype=float)
    if len(values) == 0:
        return Figure(math.nan, math.nan, math.nan, 0)
    rng = np.random.default_rng(seed)
    means = rng.choice(values, (resamples, len(values))).mean(axis=1)
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Figure(float(values.mean()), float(low), float(high), len(values))


def _ended(pairs: Sequence[tuple[Outcome, Truth]]) -> int:
    return sum(fate(o, t) is Fate.AT_THE_END and t.label is Label.HACKING for o, t in pairs)


def _known(figure: Callable[[Outcome, Truth], float | None], pairs: Sequence[tuple[Outcome, Truth]]) -> list[float]:
    return [value for value in (figure(outcome, truth) for outcome, truth in pairs) if value is not None]
