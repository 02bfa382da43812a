"""Building blocks of noiseless curves: rises, falls, dips that recover, and growth of the KL.

Time `t` runs from 0 at the first eval to 1 at the last. The eval score starts at 0 and its highest value is 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from evalstop_lab.worlds.truth import Floats

Growth = Callable[[Floats], Floats]


@dataclass(frozen=True, eq=False)
class Curve:
    """The noiseless eval score, proxy and KL to the initial policy at each eval."""

    eval_scores: Floats
    proxy: Floats
    kl: Floats


def draw_log_uniform(rng: np.random.Generator, low: float, high: float) -> float:
    return float(np.exp(rng.uniform(np.log(low), np.log(high))))


def draw_rise(rng: np.random.Generator) -> Growth:
    """A random rise from 0 at t = 0 to 1 at t = 1: exponential, power law or logistic; constant after 1."""
    form = rng.integers(3)
    if form == 0:
        rate = rng.uniform(1.5, 6.0)
        return lambda t: (1 - np.exp(-rate * np.clip(t, 0, 1))) / (1 - np.exp(-rate))
    if form == 1:
        power = rng.uniform(0.35, 0.9)
        return lambda t: np.asarray(np.clip(t, 0, 1) ** power)
    middle, width = rng.uniform(0.3, 0.6), rng.uniform(0.06, 0.15)
    low, high = logistic(-middle / width), logistic((1 - middle) / width)
    return lambda t: (logistic((np.clip(t, 0, 1) - middle) / width) - low) / (high - low)


def draw_saturation(rng: np.random.Generator, slowest: float, fastest: float) -> Growth:
    """Growth from 0 to 1 that slows down exponentially."""
    rate = rng.uniform(slowest, fastest)
    return lambda t: (1 - np.exp(-rate * t)) / (1 - np.exp(-rate))


def draw_distance_growth(rng: np.random.Generator) -> Growth:
    """A random growth of d = sqrt(KL) from 0 to 1: power law (slowing or accelerating), logarithmic or exponential."""
    form = rng.integers(4)
    if form == 0:
        power = rng.uniform(0.4, 1.0)
        return lambda t: np.asarray(t**power)
    if form == 1:
        rate = rng.uniform(2.0, 30.0)
        return lambda t: np.log1p(rate * t) / np.log1p(rate)
    if form == 2:
        return draw_saturation(rng, 1.0, 4.0)
    power = rng.uniform(1.2, 2.0)
    return lambda t: np.asarray(t**power)


def draw_fall(rng: np.random.Generator) -> Growth:
    """A random fall after a peak, from 0 to 1: a power law, faster at first, linear, or faster at the end."""
    power = rng.choice([0.7, 1.0, 1.5, 2.0])
    return lambda t: np.asarray(np.clip(t, 0, 1) ** power)


def logistic(x: Floats | float) -> Floats:
    return np.asarray(1 / (1 + np.exp(-np.asarray(x, dtype=float))))


def v_shape(t: Floats, start: float, bottom: float, end: float) -> Floats:
    """0 outside (start, end), 1 at `bottom`, linear between."""
    return np.interp(t, [start, bottom, end], [0.0, 1.0, 0.0], left=0.0, right=0.0)


def u_shape(t: Floats, start: float, end: float, edge: float) -> Floats:
    """0 outside (start, end), 1 inside, with two linear edges; each takes the share `edge` of the interval."""
    side = edge * (end - start)
    return np.interp(t, [start, start + side, end - side, end], [0.0, 1.0, 1.0, 0.0], left=0.0, right=0.0)


def sudden_drop(t: Floats, start: float, end: float) -> Floats:
    """0 up to `start`, then 1, with an exponential decay to exactly 0 at `end`."""
    s = np.clip((t - start) / (end - start), 0, 1)
    shape = (np.exp(-4 * s) - np.exp(-4)) / (1 - np.exp(-4))
    return np.where(t <= start, 0.0, shape)
