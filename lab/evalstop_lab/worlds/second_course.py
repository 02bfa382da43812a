"""The noiseless course of a run, as a kind of run draws it, and the building blocks of courses.

The unit of quality is the gain: a run starts at 0, and its best quality is near 1. `x` is the completed share of the
run at each eval, 0 to 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.random import Generator
from numpy.typing import ArrayLike

from evalstop_lab.worlds.noise import NoiseKind
from evalstop_lab.worlds.truth import Floats


class Scale(StrEnum):
    """The scale of an eval score: a share of right answers, a reward, a negative loss, or a rating."""

    SHARE = "share"
    REWARD = "reward"
    LOSS = "loss"
    RATING = "rating"


class Reward(StrEnum):
    """The proxy of a kind that does not draw it: it always rises, follows the quality, or is not logged."""

    CLIMBS = "climbs"
    FOLLOWS = "follows"
    ABSENT = "absent"


@dataclass(frozen=True, eq=False)
class Course:
    """One run before it is measured.

    `quality`: noiseless, in gains. `proxy`: noiseless, or how to draw it. `shift`, `stretch`: the effect of a changed
    grader on the measured score, in gains, without effect on the quality. `failed`: the indices of failed evals, which
    are posted as 0. `noise`, `scale`: drawn if None. `policy_kl`: whether the run has a KL; supervised runs have none.
    """

    quality: Floats
    proxy: Floats | Reward = Reward.FOLLOWS
    scale: Scale | None = None
    shift: Floats | None = None
    stretch: float = 1.0
    failed: tuple[int, ...] = ()
    noise: NoiseKind | None = None
    policy_kl: bool = True


DrawCourse = Callable[[Generator, Floats], Course]


@dataclass(frozen=True)
class Kind:
    """A kind of run: whether it turns, how it is drawn, and its minimum and maximum number of evals."""

    turns: bool
    course: DrawCourse = field(repr=False)
    shortest: int
    longest: int


KINDS: dict[str, Kind] = {}
"""All kinds of runs that the other modules of the suite declare."""


def kind(*, turns: bool, shortest: int = 8, longest: int = 600) -> Callable[[DrawCourse], DrawCourse]:
    """Add a function `draw_<name>` to the kinds of runs."""

    def add(draw: DrawCourse) -> DrawCourse:
        KINDS[draw.__name__.removeprefix("draw_")] = Kind(turns, draw, shortest, longest)
        return draw

    return add


def draw_rise(rng: Generator, x: Floats, begin: float = 0.0, end: float = 1.0) -> Floats:
    """A random learning curve: it rises from 0 at `begin` to 1 at `end` and is flat outside."""
    t = ramp(x, begin, end)
    match rng.integers(4):
        case 0:
            rate = rng.uniform(1.5, 6.0)
            return np.asarray(np.expm1(-rate * t) / np.expm1(-rate))
        case 1:
            rate = rng.uniform(4.0, 50.0)
            return np.asarray(np.log1p(rate * t) / np.log1p(rate))
        case 2:
            half = rng.uniform(0.08, 0.7)
            return t / (t + half) * (1 + half)
        case _:
            middle, width = rng.uniform(0.25, 0.5), rng.uniform(0.07, 0.16)
            low, value, high = (1 / (1 + np.exp(-(at - middle) / width)) for at in (np.zeros(1), t, np.ones(1)))
            return (value - low) / (high - low)


def draw_fall(rng: Generator, x: Floats, begin: float) -> Floats:
    """A random fall, from 0 up to `begin` to 1 at the end: linear, S-shaped, accelerating or slowing."""
    t = ramp(x, begin, 1.0)
    match rng.integers(4):
        case 0:
            return t
        case 1:
            return t * t * (3 - 2 * t)
        case 2:
            return t ** rng.uniform(1.3, 2.5)
        case _:
            return 1 - (1 - t) ** rng.uniform(1.3, 2.5)


def ramp(x: Floats, begin: float, end: float) -> Floats:
    """Linear from 0 at `begin` to 1 at `end`, flat outside."""
    return np.clip((x - begin) / max(end - begin, 1e-9), 0.0, 1.0)


def bump(x: Floats, begin: float, end: float, steep: float = 1.0) -> Floats:
    """A bump of height 1 between `begin` and `end`; if `steep` is above 1, its maximum is early."""
    t = ramp(x, begin, end)
    return np.sin(np.pi * t ** (1 / steep)) ** 2


def at_least_evals(x: Floats, share: float, evals: int) -> float:
    """This share of the run, or the share of that many evals if it is larger."""
    return max(share, evals / max(len(x) - 1, 1))


def draw_place(rng: Generator, x: Floats, low: float, high: float) -> int:
    """The index of a random eval between two shares of the run."""
    last = len(x) - 1
    return int(np.clip(round(rng.uniform(low, high) * last), 1, last))


def draw_rising_proxy(rng: Generator, x: Floats) -> Floats:
    """A proxy that rises all the time."""
    return draw_rise(rng, x) * rng.uniform(0.6, 1.0) + x * rng.uniform(0.05, 0.5)


def sum_steps(x: Floats, places: ArrayLike, heights: ArrayLike) -> Floats:
    """The sum of step functions: each height applies from its place on."""
    reached = x[:, None] >= np.atleast_1d(places)[None, :]
    return np.asarray(reached @ np.atleast_1d(heights), dtype=np.float64)
