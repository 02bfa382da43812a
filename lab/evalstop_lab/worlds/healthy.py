"""Healthy curves without dips: the eval score ends at its maximum."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from evalstop_lab.worlds.curves import Curve, draw_distance_growth, draw_saturation, logistic
from evalstop_lab.worlds.truth import Floats


def draw_saturate(rng: np.random.Generator, n: int) -> Curve:
    """Growth that slows down but never stops."""
    t = np.linspace(0, 1, n)
    return add_proxy_and_kl(rng, draw_saturation(rng, 1.0, 6.0)(t))


def draw_plateau(rng: np.random.Generator, n: int) -> Curve:
    """A fast rise, then exactly flat."""
    t = np.linspace(0, 1, n)
    return add_proxy_and_kl(rng, np.asarray(np.minimum(1, (t / rng.uniform(0.08, 0.4)) ** rng.uniform(0.5, 1.0))))


def draw_slow_start(rng: np.random.Generator, n: int) -> Curve:
    """No growth for a long time, then growth."""
    t = np.linspace(0, 1, n)
    middle, width = rng.uniform(0.3, 0.7), rng.uniform(0.03, 0.12)
    return add_proxy_and_kl(rng, _normalize(logistic((t - middle) / width)))


def draw_late_jump(rng: np.random.Generator, n: int) -> Curve:
    """A plateau for most of the run, then a jump to a higher plateau."""
    t = np.linspace(0, 1, n)
    low, when, width = rng.uniform(0.3, 0.8), rng.uniform(0.5, 0.9), rng.uniform(0.005, 0.03)
    return add_proxy_and_kl(
        rng, _normalize(low * draw_saturation(rng, 8.0, 20.0)(t) + (1 - low) * logistic((t - when) / width))
    )


def draw_stairs(rng: np.random.Generator, n: int) -> Curve:
    """Plateaus with growth between them."""
    t = np.linspace(0, 1, n)
    steps = int(rng.integers(2, 6))
    middles = np.sort(rng.uniform(0.05, 0.92, steps))
    heights = rng.dirichlet(np.full(steps, 3.0))
    width = rng.uniform(0.005, 0.03)
    return add_proxy_and_kl(
        rng, _normalize(np.asarray(sum(h * logistic((t - m) / width) for h, m in zip(heights, middles, strict=True))))
    )


def draw_drift_and_jump(rng: np.random.Generator, n: int) -> Curve:
    """A slow rise over the whole run, with one or two small jumps upward."""
    t = np.linspace(0, 1, n)
    eval_scores = rng.uniform(0.3, 0.7) * t
    for when in rng.uniform(0.1, 0.85, int(rng.integers(1, 3))):
        eval_scores = eval_scores + rng.uniform(0.1, 0.4) * logistic((t - when) / 0.005)
    return add_proxy_and_kl(rng, _normalize(eval_scores))


def add_proxy_and_kl(rng: np.random.Generator, eval_scores: Floats) -> Curve:
    """Add the proxy and KL of a healthy run; `eval_scores` must have no dips.

    The proxy follows the eval score, and in half of the runs also rises slightly on its own.
    """
    t = np.linspace(0, 1, len(eval_scores))
    own_growth = rng.uniform(0.05, 0.4) if rng.random() < 0.5 else 0.0
    proxy = np.clip(eval_scores, 0, None) ** rng.uniform(0.7, 1.1) + own_growth * draw_distance_growth(rng)(t)
    return Curve(eval_scores, proxy, kl=(rng.uniform(0.7, 5.0) * draw_distance_growth(rng)(t)) ** 2)


def _normalize(eval_scores: Floats) -> Floats:
    return np.asarray((eval_scores - eval_scores[0]) / (eval_scores.max() - eval_scores[0]))


HEALTHY: dict[str, Callable[[np.random.Generator, int], Curve]] = {
    "saturate": draw_saturate,
    "plateau": draw_plateau,
    "slow_start": draw_slow_start,
    "late_jump": draw_late_jump,
    "stairs": draw_stairs,
    "drift_and_jump": draw_drift_and_jump,
}
