"""Evidence valid at any time: the expected eval score has fallen below its best by more than a tolerance.

Source      Shin, Ramdas & Rinaldo, "E-detectors" (arXiv 2203.03532), for evidence of a change at an unknown time;
            Howard, Ramdas, McAuliffe & Sekhon (arXiv 1810.08240) for bounds that hold at all times at once;
            Ville's inequality turns both into a bound on ever having a false alarm.
Null        At no time has the expected score been below the best expected score before it by more than `tolerance`.
Assumes     Noise of an eval given those before it is sub-Gaussian with the standard error given; without one, that it
            is independent with the same distribution at all times, and as heavy about its middle as a normal one.
Bets        After eval n the process has gained exp(b z - b^2 / 2) on every bet b, z = (reference - tolerance - y) / sd
            and at most 4. The reference, fixed before y is seen, lies below the best expected score so far, so that
            under the null no bet gains on average. Bets start at every eval, the j-th with the share
            1 / (2.11 (j + 1) ln^2 (j + 1)) of all money; four sizes b share equally. Unbet money counts.
Reference   The largest lower bound so far of the mean of a window: mean - sd sqrt(2 ln(1 / share) / w). The shares of
            all windows ever used add up to alpha / 4. A value counts in it for at most 4 standard deviations more
            than the one before. A bound at one standard deviation, tempting because the
            process then gains sooner, is not a bound: with it a nominal 0.01 became 0.7 and more.
Scale       Without standard errors: an upper bound of the median of |y[2i] - y[2i-1]| over disjoint pairs, which holds
            at all times except with probability alpha / 4, from a histogram with eight bins an octave, rounded up.
Windows     Of 1, 2, 4, 8, ... evals, side by side, and each two neighbors together.
State       For each length one window and a half, the money on four bets, and the histogram. O(log n).
Evidence    The natural logarithm of the e-value; it ever reaches ln(2 / alpha) with probability at most alpha / 2, and
            one of all three bounds fails with at most alpha. The turn is placed at the end of the reference's window.
Not done    It certifies that the eval score has fallen, not that it stays down: a dip that recovers is a true fall.
            Positive autocorrelation makes the scale too small and voids the guarantee; so do standard errors that
            are too small. See the table in its documentation.
"""

from __future__ import annotations

import math
from typing import Annotated, ClassVar

from msgspec import Meta, Struct
from msgspec.structs import replace

from evalstop_detectors.checkpoint.noise import clipped
from evalstop_detectors.detectors.detector import Amount, Detector, Evidence, Kind, Thresholds
from evalstop_detectors.observation import MetricRole, Observation
from evalstop_detectors.summation import add_up

_BETS = (0.125, 0.25, 0.5, 1.0)
_LARGEST_Z = 4.0
_SMALLEST_Z = -1e6
_ALL_STARTS = 2.10975
_MEDIAN_DIFFERENCE = 0.9538
_BINS_AN_OCTAVE = 8
_BINS = 40 * _BINS_AN_OCTAVE
_NO_DIFFERENCE = -1_000_000
_LARGEST_STDERR = 1e100
_UNKNOWN = 1e240
_KNOWN = 1e220


class Window(Struct, frozen=True):
    """The mean of some consecutive values, relative to the first of the run, and of the variances of their noise."""

    mean: float
    variance: float


class EProcessState(Struct, frozen=True):
    """See the module's docstring. `windows[k]` is the last whole window of 2^k evals. `log_money` is the money on the
    bets of each size, `rest` the unbet money; `bins` counts pairs by the size of their difference."""

    seen: int = 0
    origin: float = 0.0
    previous: float = 0.0
    windows: tuple[Window, ...] = ()
    reference: float | None = None
    reference_step: int | None = None
    starts: int = 0
    log_money: tuple[float, ...] = ()
    rest: float = 1.0
    unpaired: float | None = None
    pairs: int = 0
    bins: dict[str, int] = {}
    sd: float | None = None
    evidence: Evidence = Evidence(Kind.LOG_E_VALUE, 0.0, None, "no evals yet")


class EProcess(Detector[EProcessState], frozen=True):
    """Bets that the eval score lies below its best.

    `alpha`: the probability of ever a false alarm. `tolerance`: how far the eval score may lie below its best, in its
    unit.

    A level of 10, with a standard error of 1, that falls to 5 after 30 evals:

    >>> detector, state = EProcess(), EProcess().start()
    >>> for step in range(80):
    ...     score = (10 if step < 30 else 5) + step % 2
    ...     state, evidence = detector.step(state, Observation(MetricRole.EVAL, step, score, 1.0))
    ...     if evidence.reaches(detector.thresholds.stop_at):
    ...         print(f"step {step}: {evidence.value:.1f}, turn at step {evidence.turn_step}")
    ...         break
    step 34: 8.3, turn at step 31
    """

    name: ClassVar[str] = "e_process"
    kind: ClassVar[Kind] = Kind.LOG_E_VALUE
    roles: ClassVar[frozenset[MetricRole]] = frozenset({MetricRole.EVAL})
    state_type: ClassVar[type[EProcessState]] = EProcessState

    alpha: Annotated[float, Meta(ge=1e-9, le=0.5)] = 0.01
    tolerance: Amount = 0.0

    @property
    def thresholds(self) -> Thresholds:
        stop_at = math.log(2 / self.alpha)
        return Thresholds(suspect_at=stop_at / 2, stop_at=stop_at)

    @property
    def stated_risk(self) -> float:
        return self.alpha

    def step(self, state: EProcessState, observation: Observation) -> tuple[EProcessState, Evidence]:
        if observation.finite:
            state = self._advance(state, observation)
        return state, state.evidence

    def _advance(self, state: EProcessState, observation: Observation) -> EProcessState:
        origin = state.origin if state.seen else clipped(observation.value)
        value = clipped(clipped(observation.value) - origin)
        stderr = observation.stderr
        sd = min(stderr, _LARGEST_STDERR) if stderr is not None and 0 < stderr < math.inf else state.sd
        variance = _UNKNOWN if sd is None else sd * sd
        state = replace(self._bet(state, value, sd if variance > 0 else None), seen=state.seen + 1, origin=origin)
        # The rise of a value is bounded: that only lowers a lower bound, and keeps outliers out of it.
        counted = value if sd is None else min(value, state.previous + _LARGEST_Z * sd)
        state = replace(self._refer(state, Window(counted, variance), observation.step), previous=value)
        return self._measure(state, value)

    def _bet(self, state: EProcessState, value: float, sd: float | None) -> EProcessState:
        """Let every bet gain or lose with this value."""
        if state.reference is None or sd is None:
            missing = "needs standard errors, or some 40 evals without"
            return state if state.log_money else replace(state, evidence=_evidence(0.0, None, missing))
        z = min(max((state.reference - self.tolerance - value) / sd, _SMALLEST_Z), _LARGEST_Z)
        starts = state.starts + 1
        share = 1 / (_ALL_STARTS * (starts + 1) * math.log(starts + 1) ** 2)
        log_share = math.log(share)
        log_bets = state.log_money or (None,) * len(_BETS)
        log_money = tuple(
            (log_share if money is None else _log_sum(money, log_share)) + bet * z - bet * bet / 2
            for bet, money in zip(_BETS, log_bets, strict=True)
        )
        rest = max(state.rest - share, 0.0)
        top = max(log_money)
        log_mean = top + math.log(add_up(math.exp(money - top) for money in log_money) / len(_BETS))
        log_value = max(_log_sum(log_mean, math.log(rest)) if rest > 0 else log_mean, 0.0)
        needed = math.log(2 / self.alpha)
        note = f"log evidence of {log_value:.1f} that the eval score has fallen below its best, {needed:.1f} stops"
        evidence = _evidence(log_value, state.reference_step if log_value > 0 else None, note)
        return replace(state, starts=starts, log_money=log_money, rest=rest, evidence=evidence)

    def _refer(self, state: EProcessState, window: Window, step: int) -> EProcessState:
        """Evaluate the windows that end with this value."""
        windows = list(state.windows)
        bounds = [self._lower_bound(window, 0, state.seen)]
        power, index = 0, state.seen
        while power < len(windows):
            # The last two windows of one length make one of twice the length, a whole one if their number is even.
            last = windows[power]
            joined = Window((last.mean + window.mean) / 2, (last.variance + window.variance) / 2)
            bounds.append(self._lower_bound(joined, power + 1, index))
            windows[power] = window
            if index % 2:
                break
            window, power, index = joined, power + 1, index // 2
        else:
            windows.append(window)
        best = max((bound for bound in bounds if bound is not None), default=None)
        if best is None or (state.reference is not None and best <= state.reference):
            return replace(state, windows=tuple(windows))
        return replace(state, windows=tuple(windows), reference=best, reference_step=step)

    def _lower_bound(self, window: Window, power: int, index: int) -> float | None:
        """The lower bound of the mean of the index-th window of 2^power evals; all shares add up to alpha / 4."""
        if not 0 < window.variance < _KNOWN:
            return None
        log_share = math.log(self.alpha / 4) - math.log((power + 1) * (power + 2)) - math.log(index * (index + 1))
        return window.mean - math.sqrt(-2 * log_share * window.variance / 2**power)

    def _measure(self, state: EProcessState, value: float) -> EProcessState:
        """Update the bound of the scale after each pair of values."""
        if state.unpaired is None:
            return replace(state, unpaired=value)
        bins = _binned(state.bins, abs(value - state.unpaired))
        pairs = state.pairs + 1
        rank = _rank(pairs, math.log(pairs * (pairs + 1) * 4 / self.alpha))
        # For values that repeat themselves the scale stays unknown.
        sd = None if rank is None else _upper_end(bins, rank) / _MEDIAN_DIFFERENCE or None
        return replace(state, unpaired=None, bins=bins, pairs=pairs, sd=sd)


def _evidence(value: float, turn_step: int | None, note: str) -> Evidence:
    return Evidence(Kind.LOG_E_VALUE, value, turn_step, note)


def _log_sum(a: float, b: float) -> float:
    return max(a, b) + math.log1p(math.exp(-abs(a - b)))


def _binned(bins: dict[str, int], difference: float) -> dict[str, int]:
    """Count one difference; those 40 octaves below the largest are counted there, which only raises the bound."""
    counts = dict(bins)
    if difference > 0:
        mantissa, exponent = math.frexp(difference)
        number = _BINS_AN_OCTAVE * exponent + int((2 * mantissa - 1) * _BINS_AN_OCTAVE)
    else:
        number = _NO_DIFFERENCE
    counts[str(number)] = counts.get(str(number), 0) + 1
    lowest = max(map(int, counts)) - _BINS
    for key in [key for key in counts if _NO_DIFFERENCE < int(key) < lowest]:
        counts[str(lowest)] = counts.get(str(lowest), 0) + counts.pop(key)
    return counts


def _upper_end(bins: dict[str, int], rank: int) -> float:
    """The upper end of the bin that holds the difference of this rank, from 1."""
    for number in sorted(map(int, bins)):
        rank -= bins[str(number)]
        if rank <= 0:
            exponent, part = divmod(number, _BINS_AN_OCTAVE)
            return math.ldexp(0.5 + (part + 1) / (2 * _BINS_AN_OCTAVE), exponent)
    raise AssertionError("a rank is at most the number of pairs")


def _rank(pairs: int, log_odds: float) -> int | None:
    """The smallest rank that lies below the median with probability at most exp(-log_odds), by Chernoff's bound."""
    low, high = pairs // 2, pairs
    if pairs * math.log(2) < log_odds:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        q = middle / pairs
        divergence = math.log(2) + q * math.log(q) + (1 - q) * math.log(1 - q)
        low, high = (low, middle) if pairs * divergence >= log_odds else (middle, high)
    return high
