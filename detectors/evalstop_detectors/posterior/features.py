"""The inputs of the posterior detector's network: 34 numbers an eval, free of the metric's unit and origin.

They have the same bits on every machine: the code uses only what IEEE 754 rounds correctly (+ - * / sqrt, comparisons)
and a logarithm built from these.

Scale       Scores are relative to the first one. Levels are shares of the range that medians of three have covered, or
            multiples of the noise. Noise is the smaller of two estimates, from first and from second differences, each
            clipped at four times itself, so that neither trends nor single failed evals count as noise; a standard
            error from the trainer is a lower bound.
State       36 numbers (`FeatureState`). O(1).
"""

from __future__ import annotations

import math
from typing import NamedTuple

from msgspec import Struct

FEATURES = 34
PLAN = slice(19, 22)  # the features of a plan: told or not, the share that has passed, and what remains
WINDOW = 48.0  # the memory of a noise estimate, in evals
CUT = 4.0  # an absolute difference is clipped at this multiple of its mean so far
LEAST_NOISE = 0.005  # of the range
_NORMAL_DIFFERENCE = 1.1283791670955126  # E|a - b| of independent normal values of variance 1
_NORMAL_SECOND_DIFFERENCE = 1.9544100476116797  # E|a - 2 b + c|
_SECOND_MARGIN = 1.1
LIMIT = 8.0
LN2 = 0.6931471805599453
_LARGEST = 1e100  # its square is finite; features reach LIMIT long before


class FeatureState(Struct, frozen=True, array_like=True):
    """The state of a run; scores are relative to the first, `last` and `before` are the latest two.

    `start` is the mean of the first three, `level` the median of the latest three, `best` and `low` its extremes,
    `since` the evals since `best`. `first`, `second`: mean absolute differences. `healed`, `down`: the deepest fall
    below the best that has healed, and the current one. `quick`, `slow`: exponential means, and their best. `proxy_*`
    are of the proxy, relative to its first; `proxy_then` is its value at the best. `root_kl` is the largest sqrt(KL).
    `quiet`: an exponential mean of the changes. Since the best: `cliff`, the deepest fall from one eval to the next,
    `cliff_age` evals ago, when the proxy moved by `proxy_with`; `kl_jump`, the largest ratio of sqrt(KL) to its
    exponential mean before. `kl_then` is sqrt(KL) before the best.
    """

    evals: float = 0.0
    origin: float = 0.0
    last: float = 0.0
    before: float = 0.0
    start: float = 0.0
    level: float = 0.0
    best: float = 0.0
    low: float = 0.0
    since: float = 0.0
    first: float = 0.0
    second: float = 0.0
    stderr_squares: float = 0.0
    stderrs: float = 0.0
    healed: float = 0.0
    down: float = 0.0
    quick: float = 0.0
    quick_best: float = 0.0
    slow: float = 0.0
    slow_best: float = 0.0
    proxies: float = 0.0
    proxy_origin: float = 0.0
    proxy_last: float = 0.0
    proxy_best: float = 0.0
    proxy_low: float = 0.0
    proxy_first: float = 0.0
    proxy_then: float = 0.0
    root_kl: float = 0.0
    kls: float = 0.0
    quiet: float = 0.0
    cliff: float = 0.0
    cliff_age: float = 0.0
    proxy_with: float = 0.0
    kl_mean: float = 0.0
    kl_last: float = 0.0
    kl_then: float = 0.0
    kl_jump: float = 0.0


class Given(NamedTuple):
    """One eval as input of the network, and what is known with it."""

    score: float
    stderr: float | None = None
    proxy: float | None = None
    kl: float | None = None
    progress: float | None = None


def advance(s: FeatureState, given: Given) -> tuple[FeatureState, list[float]]:
    """Process one eval; return the state after it and its features, each within +-`LIMIT`."""
    state = _update_state(s, given)
    return state, _describe(s, state, given)


def _update_state(s: FeatureState, given: Given) -> FeatureState:
    n = s.evals + 1.0
    opening = n < 1.5
    origin = given.score if opening else s.origin
    y = given.score - origin
    # 1. Noise, as known before this eval.
    change = abs(y - s.last)
    bend = abs(y - 2.0 * s.last + s.before)
    first = second = 0.0
    if not opening:
        cut = change if n < 4.5 else min(change, CUT * s.first)
        first = s.first + 1.0 / min(n - 1.0, WINDOW) * (cut - s.first)
    if n > 2.5:
        cut = bend if n < 5.5 else min(bend, CUT * s.second)
        second = s.second + 1.0 / min(n - 2.0, WINDOW) * (cut - s.second)
    stderrs, squares = s.stderrs, s.stderr_squares
    if given.stderr is not None:
        stderrs, squares = stderrs + 1.0, squares + given.stderr * given.stderr
    # 2. Level: the median of the latest three.
    if n < 2.5:
        level = 0.0 if opening else (s.last + y) * 0.5
    else:
        level = max(min(s.last, s.before), min(max(s.last, s.before), y))
    start = s.start + (y - s.start) / n if n < 3.5 else s.start
    best = max(s.best, level)
    low = min(s.low, level)
    is_new_best = level >= best
    since = 0.0 if is_new_best else s.since + 1.0
    healed = max(s.healed, s.down) if is_new_best else s.healed
    down = 0.0 if is_new_best else max(s.down, best - level)
    quick = y if opening else s.quick + max(0.25, 1.0 / n) * (y - s.quick)
    quick_best = quick if opening else max(s.quick_best, quick)
    slow = y if opening else s.slow + max(0.06, 1.0 / n) * (y - s.slow)
    slow_best = slow if opening else max(s.slow_best, slow)
    # 3. Proxy and KL.
    proxies, proxy_origin, p, proxy_first = s.proxies, s.proxy_origin, s.proxy_last, s.proxy_first
    if given.proxy is not None:
        proxies += 1.0
        proxy_origin = given.proxy if proxies < 1.5 else proxy_origin
        p = given.proxy - proxy_origin
        if proxies > 1.5:
            proxy_change = abs(p - s.proxy_last)
            cut = proxy_change if proxies < 4.5 else min(proxy_change, CUT * proxy_first)
            proxy_first += 1.0 / min(proxies - 1.0, WINDOW) * (cut - proxy_first)
    proxy_best, proxy_low = max(s.proxy_best, p), min(s.proxy_low, p)
    proxy_then = p if is_new_best else s.proxy_then
    given_kl = _take_root_kl(given)
    root_kl = max(s.root_kl, given_kl)
    kls = s.kls if given.kl is None else s.kls + 1.0
    # 4. What broke: the deepest fall in one eval since the best, how long ago, and what moved with it.
    quiet = change if n < 2.5 else s.quiet + 0.25 * (change - s.quiet)
    cliff, cliff_age = 0.0 if is_new_best else s.cliff, s.cliff_age + 1.0
    proxy_with = 0.0 if is_new_best else s.proxy_with
    if s.last - y > cliff:
        cliff, cliff_age = s.last - y, 0.0
        proxy_with = p - s.proxy_last if proxies > 1.5 else 0.0
    kl = s.kl_last if given.kl is None else given_kl
    opens_kl = s.kls < 0.5
    kl_mean = kl if opens_kl else s.kl_mean + 0.25 * (kl - s.kl_mean)
    kl_then = kl if opens_kl else s.kl_last if is_new_best else s.kl_then
    ratio = kl / s.kl_mean if s.kl_mean > 0.0 and s.kls > 2.5 else 1.0
    kl_jump = max(1.0 if is_new_best else s.kl_jump, min(ratio, 1e9))
    return FeatureState(
        n, origin, y, s.last, start, level, best, low, since, first, second, squares, stderrs, healed, down, quick,
        quick_best, slow, slow_best, proxies, proxy_origin, p, proxy_best, proxy_low, proxy_first, proxy_then, root_kl,
        kls, quiet, cliff, cliff_age, proxy_with, kl_mean, kl, kl_then, kl_jump,
    )  # fmt: skip


def _describe(before: FeatureState, s: FeatureState, given: Given) -> list[float]:
    """The features of an eval, from the states before and after it."""
    n = s.evals
    by_first, by_second = _estimate_by_differences(s)
    sd = _estimate_noise(s, by_first, by_second)
    noise, unit = _to_scale(s, sd)
    step = 0.0 if n < 1.5 else s.last - before.last
    proxy_unit = s.proxy_best - s.proxy_low + s.proxy_first or 1.0
    proxy_noise = s.proxy_first or 1.0
    seen_proxy = 1.0 if s.proxies > 0.5 else 0.0
    # A plan that is overrun counts as none.
    planned, share = 0.0, 1.0
    if given.progress is not None and 0.0 < given.progress < 1.0:
        planned, share = 1.0, given.progress
    remaining_evals = min(n * (1.0 - share) / share, 1e9)
    both_kl = s.kl_last > 0.0 and s.kl_then > 0.0

    return [
        (s.last - s.best) / unit,
        (s.level - s.best) / unit,
        asinh(step / noise),
        asinh((s.best - s.level) / noise),
        step / unit,
        (s.level - s.low) / unit,
        log2(n) * 0.5,
        log2(noise / unit) if sd > 0.0 else -LIMIT,
        s.since / n,
        log2(1.0 + s.since) * 0.5,
        1.0 if s.stderrs > 0.5 else 0.0,
        s.healed / unit,
        s.down / unit,
        asinh((s.proxy_last - before.proxy_last) / proxy_noise) * seen_proxy,
        (s.proxy_last - s.proxy_best) / proxy_unit * seen_proxy,
        (s.proxy_last - s.proxy_then) / proxy_unit * seen_proxy,
        seen_proxy,
        1.0 if s.kls > 0.5 else 0.0,
        _take_root_kl(given) / (s.root_kl or 1.0),
        planned,
        share * planned,
        log2(1.0 + remaining_evals) * 0.5 * planned,
        asinh(2.0 * (s.quick_best - s.quick) / noise),
        asinh(4.0 * (s.slow_best - s.slow) / noise),
        # The ratio of both noise estimates separates trends and autocorrelation from white noise.
        log2(max(min(by_first / by_second, 1e9), 1e-9)) if by_first > 0.0 and by_second > 0.0 else 0.0,
        (s.best - s.start) / unit,
        asinh((s.best - s.start) / noise) * 0.5,
        log2(max(min(s.quiet / noise, 1e9), 0.001)) * 0.5,
        s.cliff / unit,
        asinh(s.cliff / noise),
        log2(1.0 + s.cliff_age) * 0.5,
        asinh(s.proxy_with / proxy_noise) * seen_proxy,
        log2(max(s.kl_jump, 1.0)),
        log2(max(min(s.kl_last / s.kl_then, 1e9), 0.001)) if both_kl else 0.0,
    ]


def measure_scale(s: FeatureState) -> tuple[float, float]:
    """The standard deviation of an eval, and the unit of the features: the range so far plus that; never 0."""
    return _to_scale(s, _estimate_noise(s, *_estimate_by_differences(s)))


def _to_scale(s: FeatureState, sd: float) -> tuple[float, float]:
    return sd or 1.0, s.best - s.low + sd or 1.0


def _estimate_noise(s: FeatureState, by_first: float, by_second: float) -> float:
    """The standard deviation of an eval."""
    n = s.evals
    sd = (by_first if n < 3.5 else min(by_first, by_second)) * (1.0 + 2.0 / n)
    stated_sd = math.sqrt(s.stderr_squares / max(s.stderrs, 1.0))
    return max(sd, LEAST_NOISE * (s.best - s.low), stated_sd)


def _estimate_by_differences(s: FeatureState) -> tuple[float, float]:
    """The standard deviation of an eval by first and by second differences, were the evals independent."""
    return s.first / _NORMAL_DIFFERENCE, _SECOND_MARGIN * s.second / _NORMAL_SECOND_DIFFERENCE


def _take_root_kl(given: Given) -> float:
    return 0.0 if given.kl is None else math.sqrt(max(given.kl, 0.0))


_ROOT_HALF = 0.7071067811865476
# log2(m) = 2/ln 2 (z + z^3/3 + ...) with z = (m - 1)/(m + 1): to 1e-8 for m in [sqrt(1/2), sqrt(2)].
_A, _B, _C, _D, _E = (2.8853900817779268 / power for power in (1, 3, 5, 7, 9))


def log2(x: float) -> float:
    mantissa, exponent = math.frexp(x)
    if mantissa < _ROOT_HALF:
        mantissa, exponent = mantissa * 2.0, exponent - 1
    z = (mantissa - 1.0) / (mantissa + 1.0)
    q = z * z
    return exponent + z * (_A + q * (_B + q * (_C + q * (_D + q * _E))))


def asinh(x: float) -> float:
    size = abs(x)
    if size > _LARGEST:
        size = _LARGEST
    mantissa, exponent = math.frexp(size + math.sqrt(size * size + 1.0))
    # As in log2, which would take as long again to call.
    if mantissa < _ROOT_HALF:
        mantissa, exponent = mantissa * 2.0, exponent - 1
    z = (mantissa - 1.0) / (mantissa + 1.0)
    q = z * z
    return math.copysign((exponent + z * (_A + q * (_B + q * (_C + q * (_D + q * _E))))) * LN2, x)
