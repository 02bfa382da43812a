"""Whether the proxy keeps rising while the eval score falls, by slopes relative to their noise.

Source      The definition of over-optimization (Gao et al., arXiv 2210.10760). Slopes over the last w evals for many w,
            with the sqrt(2 ln(n / w)) of scan statistics (Walther & Perry 2022) for the number of places searched; a
            control variate as in Lavenberg & Welch 1981; the innovations are those of Holt's linear smoothing.
Departs     The part of the eval score's surprise that the proxy's surprise predicts is subtracted from the eval score
            before its slope is computed: both are measured on one batch of prompts and share its noise. The coefficient
            is shrunk, and 0 while the surprises are not clearly correlated. A surprise has no trend, so the proxy's
            rise is not subtracted.
State       Means of the eval score and proxy over blocks of 1, 2, 4, ... evals, at most 128 of them, the noise of both
            (see `noise`), Holt's levels and trends, and the sums of the regression. O(1).
Evidence    A statistic in standard errors of a slope: the largest, over windows, of the smaller of the eval score's
            fall (less the correction) and the proxy's rise plus a slack. The turn is placed at the start of that
            window.
Not done    A proxy that falls with the eval score is no evidence here, so a collapse of both is not detected. Only
            whole blocks of the eval score count: after n evals the newest n / 64 may wait.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from operator import mul
from typing import ClassVar

from msgspec import Struct
from msgspec.structs import replace

from evalstop_detectors.checkpoint.noise import Noise, NoiseState, add_value, clipped, estimate
from evalstop_detectors.detectors.detector import Amount, Count, EvalDetector, Evidence, Kind, Thresholds
from evalstop_detectors.observation import MetricRole, Observation
from evalstop_detectors.wording import format_count, format_percent

_BLOCKS = 128
_WINDOWS = (4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128)
_PLACES = tuple(map(float, range(_BLOCKS)))  # floats: a product with a whole number takes longer
_LEVEL, _TREND = 0.3, 0.1
_MEMORY = 0.98  # of the regression, per eval: some 50 evals
_LARGEST = 1e6

Floats = tuple[float, ...]
FourSums = tuple[float, float, float, float]


class Holt(Struct, frozen=True):
    """A level and a trend per eval, which predict the next value."""

    level: float = 0.0
    trend: float = 0.0

    @property
    def expected(self) -> float:
        """The next value."""
        return self.level + self.trend

    def after(self, surprise: float) -> Holt:
        level = clipped(self.level + self.trend + _LEVEL * surprise)
        return Holt(level, clipped(self.trend + _LEVEL * _TREND * surprise))


class DivergenceState(Struct, frozen=True):
    """See the module's docstring. `block` holds the count and the sums of the eval score and proxy of the block being
    filled.

    `proxy` and `proxy_origin` are the latest proxy, relative to the first one.
    """

    proxy: float | None = None
    proxy_origin: float = 0.0
    eval_origin: float = 0.0
    pairs: int = 0
    noisy: bool = False
    eval_noise: NoiseState = NoiseState()
    proxy_noise: NoiseState = NoiseState()
    eval_holt: Holt = Holt()
    proxy_holt: Holt = Holt()
    sums: FourSums = (0.0, 0.0, 0.0, 0.0)
    stride: int = 1
    eval_scores: Floats = ()
    proxies: Floats = ()
    steps: tuple[int, ...] = ()
    block: tuple[int, float, float] = (0, 0.0, 0.0)
    evidence: Evidence = Evidence(Kind.STATISTIC, 0.0, None, "waits for an eval and a proxy before it")


class Divergence(EvalDetector[DivergenceState], frozen=True):
    """Compares the slopes of the eval score and proxy.

    `least_evals`: the evidence is 0 before this many evals with a proxy.
    `slack`: by how many standard errors the proxy may even fall; with 1, a flat proxy counts.
    `control_variate`: whether to subtract what the proxy's surprises predict from the eval score, while the eval
    score's noise exceeds the share `noisy_from` of its range (below that, surprises reflect the curve itself rather
    than noise).

    The eval score turns at step 30, while the proxy keeps rising:

    >>> detector, state = Divergence(), Divergence().start()
    >>> for step in range(80):
    ...     for role, value in ((MetricRole.PROXY, step), (MetricRole.EVAL, min(step, 60 - step))):
    ...         state, evidence = detector.step(state, Observation(role, step, value))
    ...     if evidence.reaches(detector.thresholds.stop_at):
    ...         print(f"step {step}: {evidence.value:.2f}, turn at step {evidence.turn_step}")
    ...         break
    step 45: 13.65, turn at step 26
    """

    name: ClassVar[str] = "divergence"
    kind: ClassVar[Kind] = Kind.STATISTIC
    roles: ClassVar[frozenset[MetricRole]] = frozenset({MetricRole.PROXY, MetricRole.EVAL})
    thresholds: ClassVar[Thresholds] = Thresholds(suspect_at=4.0, stop_at=12.0)
    state_type: ClassVar[type[DivergenceState]] = DivergenceState

    least_evals: Count = 6
    slack: Amount = 1.0
    control_variate: bool = True
    noisy_from: Amount = 0.05

    def take_proxy(self, state: DivergenceState, value: float) -> DivergenceState:
        value = clipped(value)
        origin = value if state.proxy is None else state.proxy_origin
        return replace(state, proxy=clipped(value - origin), proxy_origin=origin)

    def take_eval(self, state: DivergenceState, observation: Observation) -> DivergenceState:
        if (proxy := state.proxy) is None:
            return state
        pairs, step, stderr = state.pairs + 1, observation.step, observation.stderr
        value = clipped(observation.value)
        origin = state.eval_origin if pairs > 1 else value
        raw = clipped(value - origin)
        eval_surprise = clipped(raw - state.eval_holt.expected)
        proxy_surprise = clipped(proxy - state.proxy_holt.expected)
        coefficient, explained = _fit_regression(state.sums) if state.noisy else (0.0, 0.0)
        eval_score = clipped(raw - coefficient * proxy_surprise)
        if stderr is not None:
            stderr *= math.sqrt(1 - explained)
        stride, eval_scores, proxies, steps, block = _store_pair(state, eval_score, proxy, step)
        eval_noise = add_value(state.eval_noise, eval_score, stderr)
        proxy_noise = add_value(state.proxy_noise, proxy)
        noisy, turn_step = False, None
        if pairs < self.least_evals:
            missing = format_count(self.least_evals - pairs, "more eval")
            evidence = Evidence(Kind.STATISTIC, 0.0, None, f"needs {missing}, each with a proxy before it")
        else:
            of_eval = estimate(eval_noise)
            noisy = self.control_variate and of_eval.sd > self.noisy_from * (eval_noise.high - eval_noise.low)
            value, at = self._find_widest(stride, eval_scores, proxies, of_eval, proxy_noise)
            if at is not None and steps[at] < step:
                turn_step = steps[at]
            note = _describe_divergence(value, at, len(eval_scores), stride, explained)
            evidence = Evidence(Kind.STATISTIC, value, turn_step, note)
        eval_holt = state.eval_holt.after(eval_surprise) if pairs > 1 else Holt(raw)
        proxy_holt = state.proxy_holt.after(proxy_surprise) if pairs > 1 else Holt(proxy)
        sums = _add_surprises(state.sums, eval_surprise, proxy_surprise) if pairs > 3 else state.sums
        return DivergenceState(
            *(proxy, state.proxy_origin, origin, pairs, noisy, eval_noise, proxy_noise, eval_holt, proxy_holt, sums),
            *(stride, eval_scores, proxies, steps, block, evidence),
        )

    def _find_widest(
        self, stride: int, eval_scores: Floats, proxies: Floats, of_eval: Noise, proxy_noise: NoiseState
    ) -> tuple[float, int | None]:
        """The largest divergence over windows that end now, and the index of the block at which its window starts."""
        windows = _list_windows(len(eval_scores))
        best, start = 0.0, None
        if of_eval.sd <= 0 or not windows:
            return best, start
        eval_sd = of_eval.sd * of_eval.inflation / math.sqrt(stride)
        sums, moments = _sum_up(eval_scores, windows)
        falls = [
            (moments[last] - half * sums[last]) / spread / eval_sd - penalty for last, half, spread, penalty in windows
        ]
        if max(falls) <= 0:
            return best, start  # most evals: the proxy makes no difference
        of_proxy = estimate(proxy_noise)
        proxy_sd = of_proxy.sd * of_proxy.inflation / math.sqrt(stride)
        sums, moments = _sum_up(proxies, windows)
        for fall, (last, half, spread, _) in zip(falls, windows, strict=True):
            if fall > best:
                fallen = (moments[last] - half * sums[last]) / spread / proxy_sd if proxy_sd > 0 else 0.0
                if self.slack - fallen > best:
                    best, start = min(fall, self.slack - fallen), len(proxies) - last - 1
        return min(best, _LARGEST), start


Window = tuple[int, float, float, float]
"""Of a window of last blocks: the index of its oldest one, counted from the newest, half of that, what a slope is
divided by, and the penalty for the number of places that were searched."""


@cache
def _list_windows(blocks: int) -> tuple[Window, ...]:
    return tuple(
        (w - 1, (w - 1) / 2, math.sqrt(w * (w * w - 1) / 12), math.sqrt(2 * math.log(blocks / w)))
        for w in _WINDOWS
        if w <= blocks
    )


def _sum_up(values: Floats, windows: Sequence[Window]) -> tuple[list[float], list[float]]:
    """From the newest value back, as far as the longest window reaches: the sums, and those of value times index."""
    newest_first = values[: -windows[-1][0] - 2 : -1]
    return list(accumulate(newest_first)), list(accumulate(map(mul, _PLACES, newest_first)))


def _add_surprises(sums: FourSums, eval_surprise: float, proxy_surprise: float) -> FourSums:
    count, proxy_squares, products, eval_squares = sums
    return (
        _MEMORY * count + 1,
        _MEMORY * proxy_squares + proxy_surprise * proxy_surprise,
        _MEMORY * products + eval_surprise * proxy_surprise,
        _MEMORY * eval_squares + eval_surprise * eval_surprise,
    )


def _fit_regression(sums: FourSums) -> tuple[float, float]:
    """The shrunk coefficient of the proxy's surprises, and the share of the eval score's variance that they explain."""
    count, proxy_squares, products, eval_squares = sums
    if count < 8 or proxy_squares <= 0 or eval_squares <= 0:
        return 0.0, 0.0
    share = (products / math.sqrt(proxy_squares) / math.sqrt(eval_squares)) ** 2
    shrinkage = 1 - 4 * (1 - share) / (count * share) if share > 0 else 0.0
    if shrinkage <= 0:
        return 0.0, 0.0
    coefficient = products / proxy_squares
    if not math.isfinite(coefficient):
        return 0.0, 0.0
    return shrinkage * coefficient, min(share * shrinkage * (2 - shrinkage), 1.0)


def _store_pair(
    state: DivergenceState, eval_score: float, proxy: float, step: int
) -> tuple[int, Floats, Floats, tuple[int, ...], tuple[int, float, float]]:
    """The blocks with one more pair of values: blocks are joined in pairs when there are too many."""
    count, eval_sum, proxy_sum = state.block
    count, eval_sum, proxy_sum = count + 1, eval_sum + eval_score / state.stride, proxy_sum + proxy / state.stride
    steps = (*state.steps, step) if count == 1 else state.steps
    if count < state.stride:
        return state.stride, state.eval_scores, state.proxies, steps, (count, eval_sum, proxy_sum)
    eval_scores, proxies = (*state.eval_scores, eval_sum), (*state.proxies, proxy_sum)
    if len(eval_scores) < _BLOCKS:
        return state.stride, eval_scores, proxies, steps, (0, 0.0, 0.0)
    return 2 * state.stride, _joined(eval_scores), _joined(proxies), steps[::2], (0, 0.0, 0.0)


def _joined(values: Floats) -> Floats:
    return tuple((a + b) / 2 for a, b in zip(values[::2], values[1::2], strict=True))


def _describe_divergence(value: float, at: int | None, blocks: int, stride: int, explained: float) -> str:
    spared = f"; the proxy explains {format_percent(explained)} of the eval score's noise" if explained > 0 else ""
    if at is None:
        return f"the eval score does not fall while the proxy rises{spared}"
    evals = (blocks - at) * stride
    return (
        f"the eval score has fallen over {evals} evals while the proxy did not, at {value:.1f} standard errors{spared}"
    )
