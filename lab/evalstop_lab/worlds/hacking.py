"""Hacking curves: the eval score turns and does not recover, while the proxy keeps rising.

Source      Gao et al. (arXiv 2210.10760): with d = sqrt(KL), the eval score is d (a - b ln d) under reinforcement
            learning and d (a - b d) under best-of-n. With u = d / d*, where d* is d at the peak, they are u (1 - ln u)
            and u (2 - u) times the height of the peak.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from evalstop_lab.worlds.curves import Curve, draw_distance_growth, draw_fall, draw_rise
from evalstop_lab.worlds.truth import Floats


def draw_gao_rl(rng: np.random.Generator, n: int) -> Curve:
    """Gao's form for reinforcement learning."""

    def form(u: Floats) -> Floats:
        logarithms = np.log(np.maximum(u, 1e-300))
        return np.where(u > 0, u * (1 - logarithms), 0.0)

    return _draw_gao(rng, n, form)


def draw_gao_bon(rng: np.random.Generator, n: int) -> Curve:
    """Gao's form for best-of-n."""
    return _draw_gao(rng, n, lambda u: u * (2 - u))


def draw_collapse(rng: np.random.Generator, n: int) -> Curve:
    """The eval score loses half of its gain or more within a few evals and does not recover."""
    peak = _draw_peak(rng, n, 0.25, 0.8)
    return _draw_turn(rng, n, peak, rng.uniform(0.5, 2.0), duration=max(2.5 / (n - 1), rng.uniform(0.02, 0.1)))


def draw_slow(rng: np.random.Generator, n: int) -> Curve:
    """A long decline from an early peak."""
    return _draw_turn(rng, n, _draw_peak(rng, n, 0.2, 0.5), rng.uniform(0.2, 0.6))


def draw_mild(rng: np.random.Generator, n: int) -> Curve:
    """A decline slightly larger than the label requires."""
    return _draw_turn(rng, n, _draw_peak(rng, n, 0.2, 0.65), rng.uniform(0.12, 0.25))


def draw_late(rng: np.random.Generator, n: int) -> Curve:
    """A turn near the end of the run."""
    return _draw_turn(rng, n, _draw_peak(rng, n, 0.7, 0.9), rng.uniform(0.15, 0.8))


def draw_after_plateau(rng: np.random.Generator, n: int) -> Curve:
    """The eval score stays at its peak for a third of the run or more before it turns."""
    t = np.linspace(0, 1, n)
    peak = _draw_peak(rng, n, 0.5, 0.8)
    top = peak * rng.uniform(0.2, 0.5)
    eval_scores = draw_rise(rng)(t / top) - rng.uniform(0.15, 1.0) * draw_fall(rng)((t - peak) / (1 - peak))
    return _add_proxy_and_kl(rng, eval_scores)


def draw_partial_recovery(rng: np.random.Generator, n: int) -> Curve:
    """A fall, then a recovery that stays well below the peak."""
    t = np.linspace(0, 1, n)
    peak = _draw_peak(rng, n, 0.2, 0.55)
    bottom = peak + rng.uniform(0.25, 0.6) * (1 - peak)
    depth = rng.uniform(0.3, 1.0)
    remaining_fall = rng.uniform(max(0.15, 0.3 * depth), 0.8 * depth)
    eval_scores = draw_rise(rng)(t / peak) - np.interp(t, [peak, bottom, 1.0], [0.0, depth, remaining_fall], left=0.0)
    return _add_proxy_and_kl(rng, eval_scores)


def draw_never_rose(rng: np.random.Generator, n: int) -> Curve:
    """The eval score falls from the first eval on."""
    t = np.linspace(0, 1, n)
    return _add_proxy_and_kl(rng, -draw_fall(rng)(t / rng.uniform(0.2, 1.0)))


def draw_waves_down(rng: np.random.Generator, n: int) -> Curve:
    """A decline in waves: each maximum is lower than the one before."""
    t = np.linspace(0, 1, n)
    peak, depth = _draw_peak(rng, n, 0.2, 0.6), rng.uniform(0.3, 1.0)
    after = np.clip((t - peak) / (1 - peak), 0, 1)
    waves = (1 - np.cos(2 * np.pi * int(rng.integers(2, 6)) * after)) / 2
    return _add_proxy_and_kl(rng, draw_rise(rng)(t / peak) - depth * (after + rng.uniform(0.05, 0.3) * waves))


def draw_two_falls(rng: np.random.Generator, n: int) -> Curve:
    """A first fall, a plateau below the peak, and a second fall."""
    t = np.linspace(0, 1, n)
    peak, depth = _draw_peak(rng, n, 0.2, 0.5), rng.uniform(0.25, 1.2)
    first, second = np.sort(rng.uniform(peak + 0.1 * (1 - peak), 1.0, 2))
    share = rng.uniform(0.3, 0.7)
    loss = np.interp(t, [peak, first, second, 1.0], [0.0, share * depth, share * depth, depth], left=0.0)
    return _add_proxy_and_kl(rng, draw_rise(rng)(t / peak) - loss)


def _draw_gao(rng: np.random.Generator, n: int, form: Callable[[Floats], Floats]) -> Curve:
    t = np.linspace(0, 1, n)
    depth = rng.uniform(0.15, 1.5)
    end = _find_end(form, depth)
    while True:
        u = end * draw_distance_growth(rng)(t)
        if 0.15 <= np.count_nonzero(u < 1) / n <= 0.85:
            break
    return Curve(form(u), proxy=u ** rng.uniform(0.6, 0.95), kl=(rng.uniform(1.0, 6.0) * u) ** 2)


def _find_end(form: Callable[[Floats], Floats], depth: float) -> float:
    """The u > 1 at which the form has fallen by `depth` from its peak of 1."""
    low, high = 1.0, 50.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if float(form(np.array([middle]))[0]) > 1 - depth else (low, middle)
    return high


def _draw_turn(rng: np.random.Generator, n: int, peak: float, depth: float, duration: float | None = None) -> Curve:
    t = np.linspace(0, 1, n)
    eval_scores = draw_rise(rng)(t / peak) - depth * draw_fall(rng)((t - peak) / (duration or 1 - peak))
    return _add_proxy_and_kl(rng, eval_scores)


def _draw_peak(rng: np.random.Generator, n: int, earliest: float, latest: float) -> float:
    """A random time of the peak, at an eval, with at least three evals after it."""
    return min(round(rng.uniform(earliest, latest) * (n - 1)), n - 4) / (n - 1)


def _add_proxy_and_kl(rng: np.random.Generator, eval_scores: Floats) -> Curve:
    """Add a proxy that rises with the eval score and on its own and never falls, and a growing KL."""
    t = np.linspace(0, 1, len(eval_scores))
    shared = rng.uniform(0.0, 0.8)
    proxy = shared * np.maximum.accumulate(eval_scores) + (1 - shared) * draw_distance_growth(rng)(t)
    return Curve(eval_scores, proxy, (rng.uniform(1.0, 6.0) * draw_distance_growth(rng)(t)) ** 2)


HACKING: dict[str, Callable[[np.random.Generator, int], Curve]] = {
    "gao_rl": draw_gao_rl,
    "gao_bon": draw_gao_bon,
    "collapse": draw_collapse,
    "slow": draw_slow,
    "mild": draw_mild,
    "late": draw_late,
    "after_plateau": draw_after_plateau,
    "partial_recovery": draw_partial_recovery,
    "never_rose": draw_never_rose,
    "waves_down": draw_waves_down,
    "two_falls": draw_two_falls,
}
