"""How often it was right: figures from cases whose truth was seen, with intervals that bear being looked at. Pure.

A stop that was let run, in shadow mode or held out by chance, shows whether it would have been right; one that was
carried out never does. Each case that was let run with the probability p therefore stands for 1/p cases (Horvitz and
Thompson 1952, in the form of Hájek 1971: divided by the sum of the weights). Cases of one probability make a stratum.

Intervals are confidence sequences: they hold at all times at once, so that one may look after each case and act as soon
as a line is passed. Of r right and w wrong in a stratum, the mixture of likelihood ratios over all rates,

    M(q) = B(r + 1, w + 1) / (q^r (1 - q)^w),

is a martingale that begins at 1 if q is the rate (Robbins 1970; Howard et al. 2021). By Ville's inequality it ever
comes to 1/alpha with a probability of alpha at most; the interval holds all q for which it has not. With several strata
the product of their mixtures is such a martingale, however many there will be: the rates whose product has stayed
below 1/alpha are the joint set, and the interval is what the weighted mean takes on in it.

Recall and the share of false stops count cases that were never flagged, too: whether a case is seen then depends on
what it is counted as, and strata do not help. Each case has the exponent c/p instead, c being the smallest of all p:
q (x/q)^(c/p) seen with the probability p has an expectation below the martingale's by Bernoulli's inequality, as
importance weights that are bounded have in the betting of Waudby-Smith and Ramdas (2024).

What is covered: a rate that is constant within its stratum (for recall and false stops: constant, as is the smallest
probability). Without weights all three are the beta mixture itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

ALPHA = 0.05
"""The share of histories in which an interval may ever fail to hold what it is about."""

_ROUNDS = 100


@dataclass(frozen=True)
class Stratum:
    """Cases whose truth was seen with one probability: how many were right, wrong, and of which nobody can tell."""

    right: float
    wrong: float
    unknown: float = 0
    probability: float = 1.0


@dataclass(frozen=True)
class Estimate:
    """A rate with its interval: None and everything from 0 to 1 while there is nothing to go by.

    `value`, `low`, `high`: of the cases that are decided. `bounds`: the ends of the interval if all undecided cases
    were to turn out badly, and if all were to turn out well.
    """

    value: float | None
    low: float
    high: float
    bounds: tuple[float, float]
    decided: int
    undecided: int


def estimate_precision(flagged: Sequence[Stratum], alpha: float = ALPHA) -> Estimate:
    """Of the stops that were called for, the share that were right."""

    def ends(strata: Sequence[Stratum]) -> tuple[float, float]:
        return _lowest(strata, alpha), 1 - _lowest([_turned(one) for one in strata], alpha)

    right = sum(one.right / one.probability for one in flagged)
    wrong = sum(one.wrong / one.probability for one in flagged)
    return Estimate(
        _share(right, wrong),
        *ends(flagged),
        (
            ends([Stratum(s.right, s.wrong + s.unknown, 0, s.probability) for s in flagged])[0],
            ends([Stratum(s.right + s.unknown, s.wrong, 0, s.probability) for s in flagged])[1],
        ),
        *_counts(flagged),
    )


def estimate_recall(flagged: Sequence[Stratum], passed: Stratum, alpha: float = ALPHA) -> Estimate:
    """Of the attempts that turned, the share for which a stop was called for, and rightly.

    `passed`: the attempts that were never flagged; it was wrong to let those go on that turned.
    """
    return _compared(
        flagged,
        passed,
        alpha,
        yes=lambda one, worst: one.right + (0 if worst else one.unknown),
        no=lambda one, worst: one.wrong + (one.unknown if worst else 0),
    )


def estimate_false_stops(flagged: Sequence[Stratum], passed: Stratum, alpha: float = ALPHA) -> Estimate:
    """Of the healthy attempts, the share for which a stop was called for."""
    return _compared(
        flagged,
        passed,
        alpha,
        yes=lambda one, worst: one.wrong + (0 if worst else one.unknown),
        no=lambda one, worst: one.right + (one.unknown if worst else 0),
    )


def weighted_quantile(ordered: Sequence[tuple[float, float]], share: float) -> float:
    """Of values with their weights, in ascending order and at least one, the first that this share does not exceed."""
    wanted, passed = share * sum(weight for _, weight in ordered), 0.0
    for value, weight in ordered:
        passed += weight
        if passed >= wanted:
            return value
    return ordered[-1][0]


def _compared(
    flagged: Sequence[Stratum],
    passed: Stratum,
    alpha: float,
    yes: Callable[[Stratum, bool], float],
    no: Callable[[Stratum, bool], float],
) -> Estimate:
    """The share of `yes`, counted among the flagged, in `yes` and in `no`, counted among those that passed."""
    smallest = min((one.probability for one in flagged), default=1.0)

    def weighed(these: Sequence[Stratum], those: Stratum, worst: bool) -> Stratum:
        above = sum(yes(one, worst) * smallest / one.probability for one in these)
        return Stratum(above, no(those, worst) * smallest)

    def ends(one: Stratum) -> tuple[float, float]:
        return _lowest([one], alpha), 1 - _lowest([_turned(one)], alpha)

    sure = weighed([_decided(one) for one in flagged], _decided(passed), worst=True)
    worst, best = weighed(flagged, passed, worst=True), weighed(flagged, passed, worst=False)
    return Estimate(
        _share(sure.right, sure.wrong),
        *ends(sure),
        (ends(worst)[0], ends(best)[1]),
        round(sum(yes(_decided(one), True) for one in flagged) + no(_decided(passed), True)),
        _counts([*flagged, passed])[1],
    )


def _lowest(strata: Iterable[Stratum], alpha: float) -> float:
    """The lowest mean rate in the joint set, each case weighing the inverse of its probability."""
    # Minimize the mean of the rates q under sum log M(q) <= log 1/alpha: by Lagrange's rule each q solves a quadratic
    # equation in the multiplier, and the sum falls as that grows.
    known = [one for one in strata if one.right + one.wrong > 0]
    weights = [(one.right + one.wrong) / one.probability for one in known]
    total = sum(weights)
    if not any(one.right for one in known):
        return 0.0
    parts = [(weight / total, one) for weight, one in zip(weights, known, strict=True)]
    constant = sum(_log_beta(one.right + 1, one.wrong + 1) for one in known) + math.log(alpha)

    def rates(multiplier: float) -> list[float]:
        found = []
        for share, one in parts:
            linear = share + multiplier * (one.right + one.wrong)
            root = math.sqrt(max(0.0, linear * linear - 4 * share * multiplier * one.right))
            found.append(2 * multiplier * one.right / (linear + root))
        return found

    def excess(log_multiplier: float) -> float:
        sure = constant
        for rate, (_, one) in zip(rates(math.exp(log_multiplier)), parts, strict=True):
            sure -= one.right * math.log(rate) if one.right else 0.0
            sure -= one.wrong * math.log1p(-rate) if one.wrong else 0.0
        return sure

    found = rates(math.exp(_root(excess, -60.0, 60.0)))
    return math.fsum(share * rate for (share, _), rate in zip(parts, found, strict=True))


def _root(falling: Callable[[float], float], low: float, high: float) -> float:
    """Where a falling function crosses zero between two places, by regula falsi in the form called Illinois."""
    above, below, last = falling(low), falling(high), 0
    for _ in range(_ROUNDS):
        middle = (low * below - high * above) / (below - above)
        value = falling(middle)
        if abs(value) < 1e-9:
            return middle
        if value > 0:
            low, above, below, last = middle, value, below / 2 if last == 1 else below, 1
        else:
            high, below, above, last = middle, value, above / 2 if last == -1 else above, -1
    return low  # a rate on the safe side


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


def _turned(one: Stratum) -> Stratum:
    return Stratum(one.wrong, one.right, one.unknown, one.probability)


def _decided(one: Stratum) -> Stratum:
    return Stratum(one.right, one.wrong, 0, one.probability)


def _share(yes: float, no: float) -> float | None:
    return yes / (yes + no) if yes + no > 0 else None


def _counts(strata: Iterable[Stratum]) -> tuple[int, int]:
    strata = list(strata)
    return round(sum(one.right + one.wrong for one in strata)), round(sum(one.unknown for one in strata))
