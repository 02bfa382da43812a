"""Precision, recall and the share of false stops, from cases with known outcome, with confidence sequences. Pure.

A stop that was not carried out, in shadow mode or held out at random, shows whether it would have been right; one that
was carried out never does. So each case observed with probability p represents 1/p cases (Horvitz and Thompson 1952, in
the form of Hajek 1971: divided by the sum of the weights). Cases of one probability form a stratum.

Intervals are confidence sequences: they hold at all times simultaneously, so one may look after each case and act as
soon as a bound is reached. For r right and w wrong in a stratum, the mixture of likelihood ratios over all rates,

    M(q) = B(r + 1, w + 1) / (q^r (1 - q)^w),

is a martingale that starts at 1 if q is the rate (Robbins 1970; Howard et al. 2021). By Ville's inequality it ever
reaches 1/alpha with a probability of at most alpha; the interval holds all q for which it has not. With several strata
the product of their mixtures is such a martingale, however many there will be: the rates whose product has stayed below
1/alpha are the joint set, and the interval is the range of the weighted mean in it.

Recall and the share of false stops also count cases that were never flagged: whether such a case is observed depends
on its class, so strata do not help. Each case has the exponent c/p instead, where c is the smallest p:
q (x/q)^(c/p) observed with probability p has an expectation below the martingale's by Bernoulli's inequality, like
bounded importance weights in the betting of Waudby-Smith and Ramdas (2024).

The guarantee covers a rate that is constant within its stratum (for recall and false stops: constant, as is the
smallest probability). Without weights all three are the beta mixture itself.

The calls of one detector of a policy's panel are estimated in this second way, as if no run had been stopped: after a
stop nobody sees what the detector would have done, so stopped cases are left out, and each held-out one represents 1/p,
be it that the detector called or that it did not. That depends on the policy, and so on whether the call is right.

Which stops are held out is drawn from a decision's id and its project's seed: the decisions with observed outcomes are
then like those without, and anybody with the id and the seed can repeat and verify the draw.
"""

from __future__ import annotations

import hmac
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated
from uuid import UUID

from msgspec import Struct

from evalstop_service.domain.fields import doc

ALPHA = 0.05
"""The share of histories whose interval may ever miss the rate."""

_LEAST, _ROUNDS, _TOLERANCE = -60.0, 100, 1e-9
"""Of the search for an end: the first logarithm, the most steps, and the excess at which it ends."""


@dataclass(frozen=True)
class Stratum:
    """The numbers of right, wrong and undecided cases that were observed with one probability."""

    right: float
    wrong: float
    unknown: float = 0
    probability: float = 1.0


class Bounds(Struct, frozen=True):
    """The lower end of an interval with all undecided cases against the rate, and the upper end with all for it.

    They include the interval of decided cases. With several strata, a case against the rate in one of them leaves the
    joint set less room for low rates in the others, which can raise the lower end.
    """

    low: Annotated[float, doc("the lower end if all undecided cases turn out badly")]
    high: Annotated[float, doc("the upper end if all undecided cases turn out well")]


class Estimate(Struct, frozen=True):
    """A rate with its interval; without cases the rate is None and the interval goes from 0 to 1.

    `value`, `low`, `high`: of decided cases.
    """

    value: Annotated[float | None, doc("the estimate, from 0 to 1; null: no decided cases")]
    low: Annotated[float, doc("the lower end of its confidence interval")]
    high: Annotated[float, doc("the upper end of its confidence interval")]
    bounds: Annotated[Bounds, doc("the interval with the undecided cases counted either way")]
    decided: Annotated[int, doc("cases with a known outcome")]
    undecided: Annotated[int, doc("cases with an unknown outcome")]


class StageNumbers(Struct, frozen=True):
    """The precision behind a policy's rollout stage: of all cases of its version, and of those since its last change of
    stage. None at the start."""

    precision: Annotated[Estimate | None, doc("of all cases of this version")] = None
    precision_since: Annotated[Estimate | None, doc("of the cases since the last change of stage")] = None


def estimate_precision(flagged: Sequence[Stratum]) -> Estimate:
    """The share of stops that were right."""
    right = sum(stratum.right / stratum.probability for stratum in flagged)
    wrong = sum(stratum.wrong / stratum.probability for stratum in flagged)
    low, high = _find_ends(flagged)
    against = [Stratum(s.right, s.wrong + s.unknown, 0, s.probability) for s in flagged]
    in_favor = [Stratum(s.right + s.unknown, s.wrong, 0, s.probability) for s in flagged]
    bounds = Bounds(min(low, _find_ends(against)[0]), max(high, _find_ends(in_favor)[1]))
    return Estimate(_compute_share(right, wrong), low, high, bounds, *_count_cases(flagged))


def estimate_recall(flagged: Sequence[Stratum], *passed: Stratum) -> Estimate:
    """The share of the attempts that turned with a right stop; `passed`: attempts that were never flagged."""
    return _estimate_weighted(flagged, passed, _count_cases([*flagged, *passed])[1])


def estimate_call_precision(called: Sequence[Stratum]) -> Estimate:
    """The share of a detector's calls that were right, where the probability of a case depends on the policy's stop,
    and so on whether the call is right: the strata's shares in all calls are as uncertain as their rates."""
    return _estimate_weighted(called, called, _count_cases(called)[1])


def _estimate_weighted(hits: Sequence[Stratum], misses: Sequence[Stratum], undecided: int) -> Estimate:
    """The share of the right cases of `hits` in these and the wrong ones of `misses`.

    1. Weight each case by c/p, where c is the smallest probability: the exponent of the betting martingale.
    2. Compute the estimate and its interval from decided cases.
    3. Compute the bounds with all undecided cases counted against the rate, and with all counted for it.
    """
    smallest = min((stratum.probability for stratum in (*hits, *misses)), default=1.0)

    def weigh_cases(for_it: int, against_it: int) -> Stratum:
        above = sum((stratum.right + for_it * stratum.unknown) * smallest / stratum.probability for stratum in hits)
        below = sum(
            (stratum.wrong + against_it * stratum.unknown) * smallest / stratum.probability for stratum in misses
        )
        return Stratum(above, below)

    decided, worst, best = weigh_cases(0, 0), weigh_cases(0, 1), weigh_cases(1, 0)
    return Estimate(
        _compute_share(decided.right, decided.wrong),
        *_find_ends([decided]),
        Bounds(_find_ends([worst])[0], _find_ends([best])[1]),
        round(sum(stratum.right for stratum in hits) + sum(stratum.wrong for stratum in misses)),
        undecided,
    )


def estimate_false_stops(flagged: Sequence[Stratum], *passed: Stratum) -> Estimate:
    """The share of the healthy attempts with a stop: like the recall, with right and wrong exchanged."""
    return estimate_recall(_swap_outcomes(flagged), *_swap_outcomes(passed))


def weighted_quantile(ordered: Sequence[tuple[float, float]], share: float) -> float:
    """The weighted quantile of (value, weight) pairs in ascending order; there must be at least one."""
    target, passed = share * sum(weight for _, weight in ordered), 0.0
    for value, weight in ordered:
        passed += weight
        if passed >= target:
            return value
    return ordered[-1][0]


def _find_ends(strata: Sequence[Stratum]) -> tuple[float, float]:
    return _find_lowest_share(strata), 1 - _find_lowest_share(_swap_outcomes(strata))


def _find_lowest_share(strata: Iterable[Stratum]) -> float:
    """The lowest weighted mean of the rates in the joint set; each case is weighted by its inverse probability.

    1. Drop empty strata: their rates are free, and have no weight.
    2. Minimize the mean of the rates q under sum log M(q) <= log 1/ALPHA. By Lagrange's rule each q solves a quadratic
       equation in the multiplier, so that only one unknown remains.
    3. The excess of the sum over the bound falls as the logarithm of the multiplier grows, and is convex: Newton's
       method reaches its root from below, mostly in four steps.
    """
    decided = [stratum for stratum in strata if stratum.right + stratum.wrong > 0]
    weights = [(stratum.right + stratum.wrong) / stratum.probability for stratum in decided]
    if not any(stratum.right for stratum in decided):
        return 0.0
    parts = [(weight / sum(weights), case.right, case.wrong) for weight, case in zip(weights, decided, strict=True)]
    constant = sum(_log_beta(stratum.right + 1, stratum.wrong + 1) for stratum in decided) + math.log(ALPHA)
    log_multiplier, mean = _LEAST, 0.0
    for _ in range(_ROUNDS):
        multiplier = math.exp(log_multiplier)
        excess, slope, mean = constant, 0.0, 0.0
        for share, right, wrong in parts:
            number = right + wrong
            linear = share + multiplier * number
            root = math.sqrt(max(0.0, linear * linear - 4 * share * multiplier * right))
            rate = 2 * multiplier * right / (linear + root)
            excess -= right * math.log(rate) if right else 0.0
            excess -= wrong * math.log1p(-rate) if wrong else 0.0
            slope -= share * (right - number * rate) / (linear - 2 * share * rate)
            mean += share * rate
        if excess < _TOLERANCE:
            break
        log_multiplier -= excess / slope
    # A small fraction of a right case excludes no rate that a double can tell from 0.
    return mean if log_multiplier > _LEAST else 0.0


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


def _swap_outcomes(strata: Sequence[Stratum]) -> list[Stratum]:
    return [Stratum(stratum.wrong, stratum.right, stratum.unknown, stratum.probability) for stratum in strata]


def _compute_share(yes: float, no: float) -> float | None:
    return yes / (yes + no) if yes + no > 0 else None


def _count_cases(strata: Sequence[Stratum]) -> tuple[int, int]:
    return round(sum(s.right + s.wrong for s in strata)), round(sum(s.unknown for s in strata))


HELD_OUT_SHARE = 0.1
"""The share of stops that a new project holds out by default."""

CARRIED_OUT = "carried out"
HELD_OUT = "held out"
"""The questions; each has an independent draw."""


def draw_number(seed: str, decision_id: UUID, question: str) -> float:
    """A number in [0, 1): uniform over decisions, independent between questions, deterministic."""
    digest = hmac.digest(seed.encode(), question.encode() + decision_id.bytes, "sha256")
    return (int.from_bytes(digest[:8], "big") >> 11) / 2**53


def observed_probability(enforced_share: float, held_out_share: float) -> float:
    """The probability that a run continues after its decision, so that its outcome is observed."""
    return 1 - enforced_share * (1 - held_out_share)
