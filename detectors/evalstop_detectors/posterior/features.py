"""The inputs of the posterior detector's network: 34 numbers an eval, free of the metric's unit and origin.

The same code computes them for one run and for many at once (`Arithmetic`), with the same bits on every machine:
it uses only what IEEE 754 rounds correctly (+ - * / sqrt, comparisons) and a logarithm built from these.

Scale       Scores are relative to the first one. Levels are shares of the range that medians of three have covered, or
            multiples of the noise. Noise is the smaller of two estimates, from first and from second differences, each
            clipped at four times itself, so that neither trends nor single failed evals count as noise; a standard
            error from the trainer is a lower bound.
State       36 numbers (`FeatureState`). O(1).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from msgspec import Struct

# A number, or an array with one number for each run.
Number = Any

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


class Arithmetic(NamedTuple):
    """The operations that differ between one number and an array of them."""

    where: Callable[[Number, Number, Number], Number]
    minimum: Callable[[Number, Number], Number]
    maximum: Callable[[Number, Number], Number]
    sqrt: Callable[[Number], Number]
    log2: Callable[[Number], Number]
    absolute: Callable[[Number], Number]
    asinh: Callable[[Number], Number]


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

    evals: Number = 0.0
    origin: Number = 0.0
    last: Number = 0.0
    before: Number = 0.0
    start: Number = 0.0
    level: Number = 0.0
    best: Number = 0.0
    low: Number = 0.0
    since: Number = 0.0
    first: Number = 0.0
    second: Number = 0.0
    stderr_squares: Number = 0.0
    stderrs: Number = 0.0
    healed: Number = 0.0
    down: Number = 0.0
    quick: Number = 0.0
    quick_best: Number = 0.0
    slow: Number = 0.0
    slow_best: Number = 0.0
    proxies: Number = 0.0
    proxy_origin: Number = 0.0
    proxy_last: Number = 0.0
    proxy_best: Number = 0.0
    proxy_low: Number = 0.0
    proxy_first: Number = 0.0
    proxy_then: Number = 0.0
    root_kl: Number = 0.0
    kls: Number = 0.0
    quiet: Number = 0.0
    cliff: Number = 0.0
    cliff_age: Number = 0.0
    proxy_with: Number = 0.0
    kl_mean: Number = 0.0
    kl_last: Number = 0.0
    kl_then: Number = 0.0
    kl_jump: Number = 0.0


class Given(NamedTuple):
    """One eval as input of the network; a flag is 1 if its value exists, else 0 (and the value is arbitrary)."""

    score: Number
    stderr: Number
    has_stderr: Number
    proxy: Number
    has_proxy: Number
    kl: Number
    has_kl: Number
    progress: Number
    has_progress: Number


def advance(ops: Arithmetic, s: FeatureState, given: Given) -> tuple[FeatureState, list[Number]]:
    """Process one eval; return the state after it and its features, each within +-`LIMIT`."""
    state = _update_state(ops, s, given)
    return state, _describe(ops, s, state, given)


def _update_state(ops: Arithmetic, s: FeatureState, given: Given) -> FeatureState:
    where, minimum, maximum = ops.where, ops.minimum, ops.maximum
    n = s.evals + 1.0
    opening = n < 1.5
    origin = where(opening, given.score, s.origin)
    y = given.score - origin
    # 1. Noise, as known before this eval.
    change = ops.absolute(y - s.last)
    bend = ops.absolute(y - 2.0 * s.last + s.before)
    rate = 1.0 / minimum(maximum(n - 1.0, 1.0), WINDOW)
    rate_2 = 1.0 / minimum(maximum(n - 2.0, 1.0), WINDOW)
    first = where(n < 4.5, change, minimum(change, CUT * s.first))
    first = where(opening, 0.0, s.first + rate * (first - s.first))
    second = where(n < 5.5, bend, minimum(bend, CUT * s.second))
    second = where(n < 2.5, 0.0, s.second + rate_2 * (second - s.second))
    stderrs = s.stderrs + given.has_stderr
    squares = s.stderr_squares + given.has_stderr * given.stderr * given.stderr
    # 2. Level: the median of the latest three.
    low_2, high_2 = minimum(s.last, s.before), maximum(s.last, s.before)
    median = maximum(low_2, minimum(high_2, y))
    level = where(n < 2.5, where(opening, 0.0, (s.last + y) * 0.5), median)
    start = where(n < 3.5, s.start + (y - s.start) / n, s.start)
    best = maximum(s.best, level)
    low = minimum(s.low, level)
    is_new_best = level >= best
    since = where(is_new_best, 0.0, s.since + 1.0)
    healed = where(is_new_best, maximum(s.healed, s.down), s.healed)
    down = where(is_new_best, 0.0, maximum(s.down, best - level))
    quick = where(opening, y, s.quick + maximum(0.25, 1.0 / n) * (y - s.quick))
    quick_best = where(opening, quick, maximum(s.quick_best, quick))
    slow = where(opening, y, s.slow + maximum(0.06, 1.0 / n) * (y - s.slow))
    slow_best = where(opening, slow, maximum(s.slow_best, slow))
    # 3. Proxy and KL.
    proxies = s.proxies + given.has_proxy
    proxy_origin = where(s.proxies < 0.5, given.proxy, s.proxy_origin)
    p = where(given.has_proxy > 0.5, given.proxy - proxy_origin, s.proxy_last)
    proxy_change = ops.absolute(p - s.proxy_last)
    cut = where(proxies < 4.5, proxy_change, minimum(proxy_change, CUT * s.proxy_first))
    proxy_rate = 1.0 / minimum(maximum(proxies - 1.0, 1.0), WINDOW)
    moves = given.has_proxy * where(proxies > 1.5, 1.0, 0.0)
    proxy_first = s.proxy_first + moves * proxy_rate * (cut - s.proxy_first)
    proxy_best, proxy_low = maximum(s.proxy_best, p), minimum(s.proxy_low, p)
    proxy_then = where(is_new_best, p, s.proxy_then)
    given_kl = _take_root_kl(ops, given)
    root_kl = maximum(s.root_kl, given_kl)
    kls = s.kls + given.has_kl
    # 4. What broke: the deepest fall in one eval since the best, how long ago, and what moved with it.
    quiet = where(opening, 0.0, where(n < 2.5, change, s.quiet + 0.25 * (change - s.quiet)))
    cliff = where(is_new_best, 0.0, s.cliff)
    is_deepest = s.last - y > cliff
    cliff = where(is_deepest, s.last - y, cliff)
    cliff_age = where(is_deepest, 0.0, s.cliff_age + 1.0)
    moved = where(proxies > 1.5, p - s.proxy_last, 0.0)
    proxy_with = where(is_deepest, moved, where(is_new_best, 0.0, s.proxy_with))
    kl = where(given.has_kl > 0.5, given_kl, s.kl_last)
    opens_kl = s.kls < 0.5
    kl_mean = where(opens_kl, kl, s.kl_mean + 0.25 * (kl - s.kl_mean))
    kl_then = where(opens_kl, kl, where(is_new_best, s.kl_last, s.kl_then))
    is_known = (s.kl_mean > 0.0) & (s.kls > 2.5)
    ratio = where(is_known, kl / where(is_known, s.kl_mean, 1.0), 1.0)
    kl_jump = maximum(where(is_new_best, 1.0, s.kl_jump), minimum(ratio, 1e9))
    return FeatureState(
        n, origin, y, s.last, start, level, best, low, since, first, second, squares, stderrs, healed, down, quick,
        quick_best, slow, slow_best, proxies, proxy_origin, p, proxy_best, proxy_low, proxy_first, proxy_then, root_kl,
        kls, quiet, cliff, cliff_age, proxy_with, kl_mean, kl, kl_then, kl_jump,
    )  # fmt: skip


def _describe(ops: Arithmetic, before: FeatureState, s: FeatureState, given: Given) -> list[Number]:
    """The features of an eval, from the states before and after it."""
    where, n = ops.where, s.evals
    by_first, by_second = _estimate_by_differences(s)
    sd = _estimate_noise(ops, s, by_first, by_second)
    noise, unit = _to_scale(ops, s, sd)
    step = where(n < 1.5, 0.0, s.last - before.last)
    proxy_width = s.proxy_best - s.proxy_low + s.proxy_first
    proxy_unit = where(proxy_width > 0.0, proxy_width, 1.0)
    proxy_noise = where(s.proxy_first > 0.0, s.proxy_first, 1.0)
    seen_proxy = where(s.proxies > 0.5, 1.0, 0.0)
    # A plan that is overrun counts as none.
    planned = given.has_progress * where(given.progress < 1.0, 1.0, 0.0) * where(given.progress > 0.0, 1.0, 0.0)
    share = where(planned > 0.5, given.progress, 1.0)
    remaining_evals = ops.minimum(n * (1.0 - share) / share, 1e9)
    asinh = ops.asinh
    both_kl = (s.kl_last > 0.0) & (s.kl_then > 0.0)

    return [
        (s.last - s.best) / unit,
        (s.level - s.best) / unit,
        asinh(step / noise),
        asinh((s.best - s.level) / noise),
        step / unit,
        (s.level - s.low) / unit,
        ops.log2(n) * 0.5,
        where(sd > 0.0, ops.log2(noise / unit), -LIMIT),
        s.since / n,
        ops.log2(1.0 + s.since) * 0.5,
        where(s.stderrs > 0.5, 1.0, 0.0),
        s.healed / unit,
        s.down / unit,
        asinh((s.proxy_last - before.proxy_last) / proxy_noise) * seen_proxy,
        (s.proxy_last - s.proxy_best) / proxy_unit * seen_proxy,
        (s.proxy_last - s.proxy_then) / proxy_unit * seen_proxy,
        seen_proxy,
        where(s.kls > 0.5, 1.0, 0.0),
        _take_root_kl(ops, given) / where(s.root_kl > 0.0, s.root_kl, 1.0),
        planned,
        share * planned,
        ops.log2(1.0 + remaining_evals) * 0.5 * planned,
        asinh(2.0 * (s.quick_best - s.quick) / noise),
        asinh(4.0 * (s.slow_best - s.slow) / noise),
        where((by_first > 0.0) & (by_second > 0.0), _ratio(ops, by_first, by_second), 0.0),
        (s.best - s.start) / unit,
        asinh((s.best - s.start) / noise) * 0.5,
        ops.log2(ops.maximum(ops.minimum(s.quiet / noise, 1e9), 0.001)) * 0.5,
        s.cliff / unit,
        asinh(s.cliff / noise),
        ops.log2(1.0 + s.cliff_age) * 0.5,
        asinh(s.proxy_with / proxy_noise) * seen_proxy,
        ops.log2(ops.maximum(s.kl_jump, 1.0)),
        where(both_kl, ops.log2(ops.maximum(ops.minimum(s.kl_last / where(both_kl, s.kl_then, 1.0), 1e9), 0.001)), 0.0),
    ]


def measure_scale(ops: Arithmetic, s: FeatureState) -> tuple[Number, Number]:
    """The standard deviation of an eval, and the unit of the features: the range so far plus that; never 0."""
    return _to_scale(ops, s, _estimate_noise(ops, s, *_estimate_by_differences(s)))


def _to_scale(ops: Arithmetic, s: FeatureState, sd: Number) -> tuple[Number, Number]:
    moved = s.best - s.low + sd
    return ops.where(sd > 0.0, sd, 1.0), ops.where(moved > 0.0, moved, 1.0)


def _estimate_noise(ops: Arithmetic, s: FeatureState, by_first: Number, by_second: Number) -> Number:
    """The standard deviation of an eval."""
    n = s.evals
    sd = ops.where(n < 3.5, by_first, ops.minimum(by_first, by_second)) * (1.0 + 2.0 / n)
    stated_sd = ops.sqrt(s.stderr_squares / ops.maximum(s.stderrs, 1.0))
    return ops.maximum(ops.maximum(sd, LEAST_NOISE * (s.best - s.low)), stated_sd)


def _estimate_by_differences(s: FeatureState) -> tuple[Number, Number]:
    """The standard deviation of an eval by first and by second differences, were the evals independent."""
    return s.first / _NORMAL_DIFFERENCE, _SECOND_MARGIN * s.second / _NORMAL_SECOND_DIFFERENCE


def _take_root_kl(ops: Arithmetic, given: Given) -> Number:
    return ops.sqrt(ops.maximum(given.kl, 0.0)) * given.has_kl


def _ratio(ops: Arithmetic, first: Number, second: Number) -> Number:
    """The logarithm of the ratio of both noise estimates: it separates trends and autocorrelation from white noise."""
    ratio = ops.where(first > 0.0, first, 1.0) / ops.where(second > 0.0, second, 1.0)
    return ops.log2(ops.maximum(ops.minimum(ratio, 1e9), 1e-9))


_ROOT_HALF = 0.7071067811865476
# log2(m) = 2/ln 2 (z + z^3/3 + ...) with z = (m - 1)/(m + 1): to 1e-8 for m in [sqrt(1/2), sqrt(2)].
_A, _B, _C, _D, _E = (2.8853900817779268 / power for power in (1, 3, 5, 7, 9))


def _log2_of_one(x: float) -> float:
    mantissa, exponent = math.frexp(x)
    if mantissa < _ROOT_HALF:
        mantissa, exponent = mantissa * 2.0, exponent - 1
    z = (mantissa - 1.0) / (mantissa + 1.0)
    q = z * z
    return exponent + z * (_A + q * (_B + q * (_C + q * (_D + q * _E))))


def _log2_of_many(x: Any) -> Any:
    mantissa, exponent = np.frexp(x)
    small = mantissa < _ROOT_HALF
    mantissa = np.where(small, mantissa * 2.0, mantissa)
    z = (mantissa - 1.0) / (mantissa + 1.0)
    q = z * z
    return (exponent - small) + z * (_A + q * (_B + q * (_C + q * (_D + q * _E))))


def _asinh_of_one(x: float) -> float:
    size = abs(x)
    if size > _LARGEST:
        size = _LARGEST
    mantissa, exponent = math.frexp(size + math.sqrt(size * size + 1.0))
    # As in _log2_of_one, which would take as long again to call.
    if mantissa < _ROOT_HALF:
        mantissa, exponent = mantissa * 2.0, exponent - 1
    z = (mantissa - 1.0) / (mantissa + 1.0)
    q = z * z
    return math.copysign((exponent + z * (_A + q * (_B + q * (_C + q * (_D + q * _E))))) * LN2, x)


def _asinh_of_many(x: Any) -> Any:
    size = np.minimum(np.abs(x), _LARGEST)
    return np.copysign(_log2_of_many(size + np.sqrt(size * size + 1.0)) * LN2, x)


ONE = Arithmetic(
    lambda condition, yes, no: yes if condition else no,
    lambda a, b: a if a <= b else b,
    lambda a, b: a if a >= b else b,
    math.sqrt,
    _log2_of_one,
    abs,
    _asinh_of_one,
)
MANY = Arithmetic(np.where, np.minimum, np.maximum, np.sqrt, _log2_of_many, np.abs, _asinh_of_many)
