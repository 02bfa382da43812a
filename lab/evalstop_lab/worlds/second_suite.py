"""An independent suite of runs, to validate policies that were tuned on other runs.

The other worlds of the lab were written by the authors of the detectors. These were written by somebody else, from
general experience with PPO, GRPO, DPO and supervised fine-tuning, without knowledge of those worlds, of the detectors'
parameters or of any result. Figures on this suite therefore show how well a policy generalizes. That holds only while
the suite is used for nothing else: never choose or keep a threshold, a prior or a default because of a figure on it.
All kinds of runs have equal shares, including rare ones, so the mix is not that of a real cluster.

A run is labeled by the noiseless curve of its true quality: a changed grader, another eval set or a failed eval changes
the measured scores but never the label.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.random import Generator

from evalstop_lab.worlds import second_healthy, second_turning  # noqa: F401 - they fill KINDS
from evalstop_lab.worlds.noise import Noise, NoiseKind, correlate
from evalstop_lab.worlds.second_course import KINDS, Course, Kind, Reward, Scale, draw_rising_proxy
from evalstop_lab.worlds.shapes import draw_log_uniform
from evalstop_lab.worlds.truth import Floats, Label, Truth, label_curve
from evalstop_lab.worlds.world import World

Item = TypeVar("Item")

SECOND_SUITE: dict[str, Kind] = dict(sorted(KINDS.items(), key=lambda item: not item[1].turns))
"""The kinds of runs, turning ones first: the suite takes them in turns, in this order."""

INTERVALS = (1, 5, 10, 20, 25, 50, 100, 200, 250, 500, 1000)
NOISES = {
    NoiseKind.GAUSSIAN: 0.35,
    NoiseKind.AR1: 0.17,
    NoiseKind.HETEROSCEDASTIC: 0.13,
    NoiseKind.BINOMIAL: 0.15,
    NoiseKind.STUDENT_T3: 0.08,
    NoiseKind.OUTLIERS: 0.04,
    NoiseKind.MISSING: 0.08,
}
SCALES = {Scale.SHARE: 0.5, Scale.REWARD: 0.25, Scale.LOSS: 0.15, Scale.RATING: 0.1}
LEVELS = (0.015, 0.25)  # standard deviation of one eval as a share of the gain
STDERR_GIVEN, STDERR_UNDERSTATED = 0.55, 0.25
PLANNED_GIVEN, PLANNED_WRONG = 0.6, 0.15
PROXY_ABSENT, KL_ABSENT = 0.12, 0.3
UNSTEADY = 0.5  # share of the runs whose true quality varies from checkpoint to checkpoint


@dataclass(frozen=True, eq=False)
class Measured:
    """Eval scores and their standard errors as posted, and the noiseless `quality` on the same scale.

    `noise_sd` is the median of the standard deviations of the evals' errors.
    """

    quality: Floats
    scores: Floats
    stderr: Floats | None
    noise: NoiseKind
    noise_sd: float


def draw_planned_steps(rng: Generator, last: int) -> float | None:
    """The planned length that the trainer reports: none, the real one, or a wrong one."""
    if rng.random() >= PLANNED_GIVEN:
        return None
    if rng.random() >= PLANNED_WRONG:
        return float(last)
    return float(np.ceil(last * (rng.uniform(0.5, 0.9) if rng.random() < 0.3 else rng.uniform(1.15, 3.0))))


def add_variation(rng: Generator, quality: Floats) -> Floats:
    """Add small autocorrelated changes to the quality, in half of the runs."""
    if rng.random() >= UNSTEADY:
        return quality
    size = draw_log_uniform(rng, 0.003, 0.02) * float(np.ptp(quality))
    memory = rng.uniform(0.2, 0.9)
    return quality + size * correlate(rng.standard_normal(len(quality)), memory)


def evaluate_course(rng: Generator, course: Course, quality: Floats) -> Measured:
    """Map the quality to a scale and evaluate it with the noise, failures and grader of the course."""
    kind = course.noise or _choose(rng, NOISES)
    scale = course.scale or (Scale.SHARE if kind is NoiseKind.BINOMIAL else _choose(rng, SCALES))
    if scale is not Scale.SHARE and kind is NoiseKind.BINOMIAL:
        kind = NoiseKind.GAUSSIAN  # only shares of right answers have binomial noise
    base, gain = _draw_scale(rng, scale, large=kind is NoiseKind.BINOMIAL)
    lowest, highest = (0.0, 1.0) if scale is Scale.SHARE else (-np.inf, np.inf)
    true = np.clip(base + gain * quality, lowest, highest)
    graded = true if course.shift is None else true + gain * course.shift
    if course.stretch != 1.0 and course.shift is not None:
        changed = course.shift != 0
        graded = np.where(changed, graded.mean() + course.stretch * (graded - graded.mean()), graded)

    if kind is NoiseKind.BINOMIAL:
        items = int(draw_log_uniform(rng, 60, 800))
        scores = rng.binomial(items, np.clip(graded, 0.0, 1.0)) / items
        spread = np.sqrt(np.clip(graded * (1 - graded), 0.25 / items, None) / items)
        smoothed = (scores * items + 1) / (items + 2)
        stated_stderrs = np.sqrt(smoothed * (1 - smoothed) / items)
    else:
        spread = draw_log_uniform(rng, *LEVELS) * gain * _draw_spread(rng, kind, len(quality))
        scores = np.clip(graded + spread * _draw_errors(rng, kind, len(quality)), lowest, highest)
        stated_stderrs = spread * np.exp(0.1 * rng.standard_normal(len(quality)))
    scores[list(course.failed)] = 0.0
    if kind is NoiseKind.MISSING:
        scores[1:][rng.random(len(scores) - 1) < rng.uniform(0.03, 0.25)] = np.nan

    stderr = stated_stderrs if rng.random() < STDERR_GIVEN else None
    if stderr is not None and rng.random() < STDERR_UNDERSTATED:
        stderr = stderr * rng.uniform(0.3, 0.7)
    return Measured(true, scores, stderr, kind, float(np.median(spread)))


def draw_proxy(rng: Generator, course: Course, quality: Floats, x: Floats) -> Floats:
    """The training reward as logged; all NaN if it is not logged."""
    if course.proxy is Reward.ABSENT or rng.random() < PROXY_ABSENT:
        return np.full(len(x), np.nan)
    if course.proxy is Reward.CLIMBS:
        noiseless = draw_rising_proxy(rng, x)
    elif course.proxy is Reward.FOLLOWS:
        noiseless = rng.uniform(0.5, 1.0) * quality + rng.uniform(0.0, 0.4) * x
    else:
        noiseless = np.asarray(course.proxy, dtype=np.float64)
    noisy = noiseless + draw_log_uniform(rng, 0.01, 0.1) * float(np.ptp(noiseless)) * rng.standard_normal(len(x))
    return rng.normal(0.0, 2.0) + draw_log_uniform(rng, 0.1, 10.0) * noisy


def draw_kl(rng: Generator, course: Course, x: Floats) -> Floats:
    """The KL to the initial policy, growing or bounded by a controller; all NaN if there is none or it is not
    logged."""
    if not course.policy_kl or rng.random() < KL_ABSENT:
        return np.full(len(x), np.nan)
    growth = x ** rng.uniform(0.4, 1.3)
    if rng.random() < 0.3:
        growth = np.minimum(growth, rng.uniform(0.2, 0.8))
    kl = draw_log_uniform(rng, 0.05, 60.0) * growth
    return np.maximum(kl * (1 + rng.uniform(0.01, 0.1) * rng.standard_normal(len(x))), 0.0)


def _draw_scale(rng: Generator, scale: Scale, large: bool) -> tuple[float, float]:
    """The score at quality 0 and the gain; `large`: a gain that a small eval set can measure."""
    match scale:
        case Scale.SHARE:
            gain = draw_log_uniform(rng, 0.15 if large else 0.03, 0.45)
            return rng.uniform(0.1, 0.9 - gain), gain
        case Scale.REWARD:
            return rng.normal(0.0, 2.0), draw_log_uniform(rng, 0.2, 6.0)
        case Scale.LOSS:
            gain = draw_log_uniform(rng, 0.05, 1.0)
            return -rng.uniform(1.2, 4.0), gain
        case Scale.RATING:
            return 1000.0, draw_log_uniform(rng, 20.0, 200.0)


def _draw_errors(rng: Generator, kind: NoiseKind, count: int) -> Floats:
    """Errors of standard deviation 1, except for rare outliers."""
    match kind:
        case NoiseKind.AR1:
            memory = rng.uniform(0.4, 0.95)
            return correlate(rng.standard_normal(count), memory)
        case NoiseKind.STUDENT_T3:
            return np.asarray(rng.standard_t(3, count) / np.sqrt(3))
        case NoiseKind.OUTLIERS:
            wild = rng.random(count) < rng.uniform(0.01, 0.06)
            return rng.standard_normal(count) * np.where(wild, rng.uniform(4, 8), 1.0)
        case _:
            return rng.standard_normal(count)


def _draw_spread(rng: Generator, kind: NoiseKind, count: int) -> Floats:
    """The relative spread of errors over the run: growing, shrinking or changing at one eval if heteroscedastic."""
    if kind is not NoiseKind.HETEROSCEDASTIC:
        return np.ones(count)
    factor, x = rng.uniform(1.5, 4.0), np.linspace(0, 1, count)
    match rng.integers(3):
        case 0:
            return factor ** (x - 0.5)
        case 1:
            return factor ** (0.5 - x)
        case _:
            return np.where(x >= rng.uniform(0.2, 0.8), factor, 1.0)


def _choose(rng: Generator, shares: Mapping[Item, float]) -> Item:
    items = list(shares)
    return items[int(rng.choice(len(items), p=list(shares.values())))]


__all__ = ["SECOND_SUITE", "Kind", "draw_world"]

ATTEMPTS = 1000
EVALS_AFTER_PEAK = 2  # with fewer no rule could stop the run before its end


def draw_world(kind: str, seed: int) -> World:
    """Draw the run of this kind and seed; raises KeyError for an unknown kind.

    If a run's label differs from the label of its kind, the run is drawn again.
    """
    declared = SECOND_SUITE[kind]
    for attempt in range(ATTEMPTS):
        world = _draw_once(kind, seed, attempt)
        if _has_declared_label(declared, world.truth):
            return world
    raise AssertionError(f"{kind}: {ATTEMPTS} draws in a row do not have the declared label")


def _has_declared_label(kind: Kind, truth: Truth) -> bool:
    if not kind.turns:
        return truth.label is Label.HEALTHY
    return truth.label is Label.HACKING and len(truth.steps) - 1 - truth.peak >= EVALS_AFTER_PEAK


def _draw_once(name: str, seed: int, attempt: int) -> World:
    kind = SECOND_SUITE[name]
    rng = np.random.default_rng([zlib.crc32(name.encode()), seed, attempt])
    count = int(draw_log_uniform(rng, kind.shortest, kind.longest + 1))
    x = np.linspace(0.0, 1.0, count)
    interval = int(rng.choice(INTERVALS))
    steps = (np.arange(count, dtype=np.int64) + int(rng.random() < 0.4)) * interval
    course = kind.course(rng, x)
    quality = add_variation(rng, course.quality)
    measured = evaluate_course(rng, course, quality)
    truth = label_curve(steps, measured.quality, measured.noise_sd)
    level = measured.noise_sd / truth.unit
    return World(
        name=f"{name}-{seed}",
        family=name,
        seed=seed,
        steps=steps,
        eval_scores=measured.scores,
        eval_stderr=measured.stderr,
        proxy=draw_proxy(rng, course, quality, x),
        kl=draw_kl(rng, course, x),
        noise=Noise(measured.noise, level, correlation=0.0, stderr_given=measured.stderr is not None),
        truth=truth,
        planned_steps=draw_planned_steps(rng, int(steps[-1])),
    )
