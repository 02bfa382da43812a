"""The prior over runs on which the posterior detectors are trained.

A run is drawn in four parts: its trend (`_draw_trend`), falls that heal (`_draw_dips`), the measurement
(`_measure_scores`), and what is logged beside the score (proxy, KL, the planned length). Half of the runs turn: they
end more than a tenth of their gain below their peak.

Source      Original. Rises are integrals of exp(Gaussian process), so that they slow down, speed up and pause anywhere.
            Falls begin at any time and have nine shapes. 95 % of the dips are sharp but short, or long but shallow;
            they heal in five ways. KL is independent of the label; the proxy shares some dips and few falls.
Not here    The worlds of the lab and its recorded runs: they are the test set. None of their families is drawn here by
            its own formula.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from evalstop_lab.worlds.breaks import Break, draw_break
from evalstop_lab.worlds.noise import correlate
from evalstop_lab.worlds.shapes import draw_log_uniform
from evalstop_lab.worlds.truth import Floats, Label, label_curve

Rng = np.random.Generator

SHORTEST, LONGEST = 5, 1000
SHORT, SHORT_SHARE = 15, 0.3
TURNED_SHARE = 0.5
BROKEN_SHARE, HEALED_SHARE = 0.25, 0.03  # of the runs that turn, and of the others


@dataclass(frozen=True, eq=False)
class DrawnRun:
    """One run of the prior; every array has one entry per eval.

    `scores`, `stderrs`, `proxy`, `kl` are the measurements; NaN where one is missing. `progress` is the completed share
    of the planned steps as the trainer reports it, NaN in runs without a plan. `truth` is the noiseless score; `turned`
    says whether it ends more than a tenth of its gain below its peak, at index `peak`.
    """

    scores: Floats
    stderrs: Floats
    proxy: Floats
    kl: Floats
    progress: Floats
    truth: Floats
    turned: bool
    peak: int


def draw_run(rng: Rng, *, evals: int | None = None) -> DrawnRun:
    """Draw one run of `evals` evals (5 to 1000, log-uniform, if not given)."""
    n = evals or draw_length(rng)
    while True:
        wants_turn = rng.random() < TURNED_SHARE
        trend, broken = _draw_trend(rng, n, wants_turn)
        loss, in_proxy = _draw_dips(rng, n, trend)
        truth = trend - loss
        judged = label_curve(np.arange(n), truth, None)
        turned, peak, unit = judged.label is Label.HACKING, judged.peak, judged.unit
        if turned == wants_turn and unit > 0:
            break
    proxy = _draw_proxy(rng, n, trend, in_proxy, turned, broken)
    common = rng.standard_normal(n)
    scores, stderrs = _measure_scores(rng, truth, unit, common, broken)
    measured_proxy = np.full(n, np.nan)
    if rng.random() < 0.75:
        shared = rng.choice([0.0, 0.0, rng.uniform(0.2, 0.8)])
        level = draw_log_uniform(rng, 0.003, 0.3) * max(float(np.ptp(proxy)), 1e-9)
        spread = 1.0 if broken is None else broken.proxy_spread
        measured_proxy = proxy + level * spread * (shared * common + np.sqrt(1 - shared**2) * rng.standard_normal(n))
    kl = _draw_kl(rng, n, broken) if rng.random() < 2 / 3 else np.full(n, np.nan)
    progress = np.full(n, np.nan)
    if rng.random() < 0.5:
        wrong = rng.random()
        factor = draw_log_uniform(rng, 0.75, 2.5) if wrong < 0.15 else draw_log_uniform(rng, 2.5, 15)
        progress = np.arange(1, n + 1) / (n * (factor if wrong < 0.2 else 1.0))
    if rng.random() < 0.15:  # evals are missing here and there, and for a while
        is_kept = rng.random(n) >= rng.uniform(0.02, 0.25)
        begin = int(rng.integers(0, n))
        is_kept[begin : begin + int(rng.integers(0, max(1, n // 10)))] = False
        is_kept[[0, -1]] = True
        if is_kept.sum() >= SHORTEST and (not turned or is_kept[peak + 1 :].any()):
            scores, stderrs, measured_proxy, kl, progress, truth = (
                values[is_kept] for values in (scores, stderrs, measured_proxy, kl, progress, truth)
            )
            peak = int(np.flatnonzero(truth >= truth.max() - 1e-9)[-1])
    return DrawnRun(scores, stderrs, measured_proxy, kl, progress, truth, turned, peak)


def draw_length(rng: Rng) -> int:
    """Draw the number of evals: 5 to 15 in three runs of ten."""
    if rng.random() < SHORT_SHARE:
        return int(rng.integers(SHORTEST, SHORT + 1))
    return int(draw_log_uniform(rng, SHORT + 1, LONGEST + 1))


def _draw_process(rng: Rng, n: int, roughness: float) -> Floats:
    """A Gaussian process of unit variance on n points: a few cosines of falling size with random phases."""
    t = np.linspace(0, 1, n)
    waves = np.arange(1, 9)
    sizes = np.exp(-waves / roughness) * rng.standard_normal(8)
    process = np.cos(np.outer(t, np.pi * waves) + rng.uniform(0, 2 * np.pi, 8)) @ sizes
    return np.asarray(process / max(float(np.sqrt(np.sum(np.exp(-2 * waves / roughness)) / 2)), 1e-9))


def _draw_growth(rng: Rng, n: int) -> Floats:
    """A non-decreasing curve from 0 to 1: mostly an integral of exp(Gaussian process), with jumps and pauses; sometimes
    a simple formula."""
    t = np.linspace(0, 1, n)
    shape = rng.random()
    if shape < 0.15:
        rate = draw_log_uniform(rng, 0.5, 30)
        return np.asarray((1 - np.exp(-rate * t)) / (1 - np.exp(-rate)))
    if shape < 0.25:
        return np.asarray(t ** draw_log_uniform(rng, 0.2, 3))
    if shape < 0.35:
        middle, width = rng.uniform(0.05, 0.95), draw_log_uniform(rng, 0.01, 0.3)
        step = 1 / (1 + np.exp(-np.clip((t - middle) / width, -40, 40)))
        return np.asarray((step - step[0]) / max(float(step[-1] - step[0]), 1e-9))
    speed = np.exp(rng.uniform(0.3, 2.0) * _draw_process(rng, n, rng.uniform(0.8, 5)))
    if rng.random() < 0.6:  # learning slows down
        speed = speed * np.exp(-rng.uniform(0, 8) * t)
    if rng.random() < 0.3:  # pauses
        begin = rng.uniform(0, 1)
        speed = np.where((t > begin) & (t < begin + rng.uniform(0.05, 0.6)), 1e-3 * speed, speed)
    if rng.random() < 0.25:  # jumps
        for _ in range(int(rng.integers(1, 4))):
            speed[int(rng.integers(0, n))] += speed.sum() * rng.uniform(0.05, 0.7)
    risen = np.concatenate([[0.0], np.cumsum((speed[1:] + speed[:-1]) / 2)])
    return np.asarray(risen / risen[-1])


def _draw_trend(rng: Rng, n: int, turns: bool) -> tuple[Floats, Break | None]:
    """The score without dips, with a gain of about 1, and the break in it."""
    if rng.random() < (BROKEN_SHARE if turns else HEALED_SHARE):
        trend = _draw_healthy_trend(rng, n)
        broken = draw_break(rng, n, trend, heals=not turns)
        # What has broken for good learns no more.
        return (trend if broken.heals else trend[np.minimum(np.arange(n), broken.at)]) - broken.loss, broken
    return (_draw_turning_trend(rng, n) if turns else _draw_healthy_trend(rng, n)), None


def _draw_turning_trend(rng: Rng, n: int) -> Floats:
    start = 0 if rng.random() < 0.08 else int(np.clip(round(rng.uniform(0.02, 0.97) * (n - 1)), 0, n - 2))
    trend = np.empty(n)
    rises = start
    if start > 2 and rng.random() < 0.35:  # stays at its best for a while
        rises = max(1, int(start * rng.uniform(0.1, 0.95)))
    trend[: rises + 1] = _draw_growth(rng, rises + 1) if rises > 0 else 0.0
    trend[rises : start + 1] = trend[rises]
    remaining = n - 1 - start
    depth = draw_log_uniform(rng, 0.105, 2.0)
    trend[start:] = trend[start] - depth * _draw_fall(rng, remaining + 1)
    if start > 5 and rng.random() < 0.3:  # rounds the peak, as in Gao's formula
        width = max(1, int(rng.uniform(0.02, 0.2) * n))
        kernel = np.ones(2 * width + 1) / (2 * width + 1)
        trend = np.convolve(np.pad(trend, width, mode="edge"), kernel, mode="valid")
    return trend


def _draw_healthy_trend(rng: Rng, n: int) -> Floats:
    trend = _draw_growth(rng, n)
    shape = rng.random()
    if shape < 0.25:  # levels off
        at = rng.uniform(0.05, 0.9)
        trend = np.interp(np.linspace(0, 1, n), np.linspace(0, at, n), trend)
    elif shape < 0.4:  # wanders within the tolerance
        trend = trend + rng.uniform(0.01, 0.06) * _draw_process(rng, n, rng.uniform(1, 6))
    elif shape < 0.5:  # sags within the tolerance
        begin = rng.uniform(0.1, 0.9)
        t = np.linspace(0, 1, n)
        sag = rng.uniform(0.01, 0.09) * np.clip((t - begin) / (1 - begin), 0, 1) ** rng.uniform(0.3, 2)
        trend = np.interp(t, np.linspace(0, begin, n), trend) - sag
    return np.asarray(trend)


def _draw_fall(rng: Rng, n: int) -> Floats:
    """From 0 at its first point to about 1 at its last; ten shapes."""
    t = np.linspace(0, 1, n)
    shape = int(rng.integers(10))
    if shape == 9:  # heals less each time
        falls = int(rng.integers(2, 7))
        healed = np.linspace(0, 1, falls + 1) ** rng.uniform(1, 3)
        depth = rng.uniform(0.2, 1.0, falls)
        knots = np.sort(rng.uniform(0, 1, 2 * falls - 1))
        levels = np.column_stack([healed[:-1], healed[:-1] + depth]).ravel()
        return np.asarray(np.interp(t, [0, *knots, 1], [*levels, 1]))
    if shape == 0:
        return np.asarray(t)
    if shape == 1:
        return np.asarray(t ** draw_log_uniform(rng, 0.3, 4))
    if shape == 2:
        rate = draw_log_uniform(rng, 1, 60)
        return np.asarray((1 - np.exp(-rate * t)) / (1 - np.exp(-rate)))
    if shape == 3:  # at once, and down for good
        falls_within = int(rng.integers(1, 5))
        return np.asarray(np.minimum(np.arange(n) / falls_within, 1.0))
    if shape == 4:  # in steps
        return _draw_growth(rng, n) if n > 2 else t
    if shape == 5:  # in waves
        waves = rng.integers(1, 8)
        swing = rng.uniform(0.05, 0.5)
        return np.asarray(t + swing * np.sin(np.pi * waves * t) ** 2 * (1 - t))
    if shape == 6:  # recovers in part
        bottom, recovery_end = rng.uniform(0.1, 0.8), rng.uniform(1.2, 4)
        return np.asarray(
            np.interp(t, [0, bottom, min(0.99, bottom + rng.uniform(0.05, 0.5)), 1], [0, recovery_end, 1, 1])
        )
    if shape == 7:  # a hump: u (1 - ln u) beyond its peak
        last = rng.uniform(1.3, 12)
        u = 1 + (last - 1) * t ** rng.uniform(0.5, 1.5)
        lost = 1 - u * (1 - np.log(u))
        return np.asarray(lost / max(float(lost[-1]), 1e-9))
    hold_share = rng.uniform(0.05, 0.7)  # falls, holds, falls
    level = rng.uniform(0.2, 0.8)
    begin = rng.uniform(0.02, 0.5) * (1 - hold_share)
    return np.asarray(np.interp(t, [0, begin, begin + hold_share, 1], [0, level, level, 1]))


def _draw_dips(rng: Rng, n: int, trend: Floats) -> tuple[Floats, Floats]:
    """The losses that heal, of the score and of the proxy, as shares of the gain."""
    loss, in_proxy = np.zeros(n), np.zeros(n)
    draw = rng.random()
    if draw < 0.45 or n < 6:
        return loss, in_proxy
    common = rng.uniform(0.2, 1.0) if rng.random() < 0.6 else 0.0
    if draw < 0.53:  # regular
        cycles = rng.integers(2, 10)
        begin, end = np.sort(rng.uniform(0, 1, 2))
        t = np.linspace(0, 1, n)
        phase = np.clip((t - begin) / max(end - begin, 1e-9), 0, 1) * cycles % 1.0
        top = rng.uniform(0.2, 0.9)
        wave = np.interp(phase, [0, top, 1], [0, 1, 0]) if rng.random() < 0.5 else np.sin(np.pi * phase) ** 2
        loss = rng.uniform(0.04, 0.4) * wave
        return loss, common * loss
    if draw < 0.61:  # a warm-up of some steps: the first evals get worse before they get better
        length = int(min(0.75 * n, max(2, draw_log_uniform(rng, 2, 40))))
        top = rng.uniform(0.2, 0.85)
        t = np.linspace(0, 1, length + 1)
        shape = np.interp(t, [0, top, 1], [0, 1, 0]) if rng.random() < 0.5 else np.sin(np.pi * t) ** rng.uniform(0.5, 2)
        loss[: length + 1] = draw_log_uniform(rng, 0.05, 1.5) * shape
        return loss, common * loss
    if draw < 0.65 and n > 12:  # a restart from an earlier checkpoint
        at = int(n * rng.uniform(0.1, 0.85))
        lag = max(2, int(at * rng.uniform(0.03, 0.4)))
        index = np.concatenate([np.arange(at), np.arange(at - lag, n - lag)])
        recovery = trend - trend[index]
        return recovery, common * np.maximum(recovery, 0)
    for _ in range(int(rng.choice([1, 1, 1, 2, 2, 3, 4, 6]))):
        width = draw_log_uniform(rng, 0.01, 0.3)
        deepest = 0.7 if rng.random() < 0.05 else min(1.0, 0.06 / width)
        depth = deepest * rng.uniform(0.1, 1.0)
        evals = max(2, round(width * n))
        begin = int(rng.integers(0, max(1, n - evals - 1)))
        shape = _draw_dip(rng, evals + 1)
        end = min(n, begin + evals + 1)
        shape = depth * shape[: end - begin]
        loss[begin:end] = np.maximum(loss[begin:end], shape)
    return loss, common * loss


def _draw_dip(rng: Rng, n: int) -> Floats:
    """A dip of depth 1 that has healed at its last point."""
    t = np.linspace(0, 1, n)
    shape = int(rng.integers(5))
    if shape == 0:
        return np.interp(t, [0, rng.uniform(0.15, 0.85), 1], [0, 1, 0])
    if shape == 1:
        edge = rng.uniform(0.05, 0.4)
        return np.interp(t, [0, edge, 1 - edge, 1], [0, 1, 1, 0])
    if shape == 2:
        rate = rng.uniform(1, 6)
        return np.where(t == 0, 0.0, (np.exp(-rate * t) - np.exp(-rate)) / (1 - np.exp(-rate)))
    if shape == 3:
        return np.asarray(np.sin(np.pi * t ** rng.uniform(0.6, 1.6)) ** rng.uniform(0.7, 2.5))
    hold_share = rng.uniform(0.2, 0.9)
    return np.interp(t, [0, 1 / max(n - 1, 1), max(hold_share, 1.5 / max(n - 1, 1)), 1], [0, 1, 1, 0])


def _draw_proxy(rng: Rng, n: int, trend: Floats, in_proxy: Floats, turned: bool, broken: Break | None) -> Floats:
    """A proxy that rises independently, with the score, or both."""
    risen = np.maximum.accumulate(trend)
    risen = risen / max(float(np.ptp(risen)), 1e-9)
    proxy = rng.uniform(0, 1) * risen + rng.uniform(0, 1) * _draw_growth(rng, n)
    if broken is not None:
        proxy = (proxy if broken.heals else proxy[np.minimum(np.arange(n), broken.at)]) + broken.proxy
    elif turned and rng.random() < 0.24:  # falls with the score, or rises as it is exploited
        proxy = proxy + rng.choice([-1, 1]) * rng.uniform(0.3, 1.0) * (np.maximum.accumulate(trend) - trend)
    elif not turned and rng.random() < 0.08:  # falls while the score does not
        begin = int(rng.integers(0, n))
        proxy[begin:] -= rng.uniform(0.05, 0.6) * np.linspace(0, 1, n - begin)
    if rng.random() < 0.06:  # a reward model that is refreshed
        proxy[int(rng.integers(0, n)) :] += rng.uniform(-0.8, 0.8)
    return proxy - in_proxy


def _draw_kl(rng: Rng, n: int, broken: Break | None) -> Floats:
    t = np.linspace(0, 1, n)
    distance = rng.uniform(0.3, 6) * _draw_growth(rng, n) if rng.random() < 0.7 else t ** rng.uniform(0.3, 2)
    kl = distance**2 * (1 + rng.uniform(0, 0.1) * rng.standard_normal(n))
    if broken is not None:
        kl = kl * broken.kl
    elif rng.random() < 0.06:  # spikes
        for _ in range(int(rng.integers(1, 4))):
            at = int(rng.integers(0, n))
            kl[at : at + int(rng.integers(1, 5))] *= draw_log_uniform(rng, 2, 30)
    return np.maximum(kl, 0.0)


def _measure_scores(
    rng: Rng, truth: Floats, unit: float, common: Floats, broken: Break | None
) -> tuple[Floats, Floats]:
    """Scores with noise, faults of the evaluation and changes of the measurement; and their standard errors."""
    n = len(truth)
    size = rng.random()
    level = (
        0.0 if size < 0.04 else draw_log_uniform(rng, 0.35, 3) if size < 0.08 else draw_log_uniform(rng, 0.003, 0.35)
    )
    sd = np.full(n, level * unit) if broken is None else level * unit * broken.spread
    if rng.random() < 0.25:  # drifts
        sd = sd * np.exp(rng.uniform(-0.9, 0.9) * np.linspace(-1, 1, n))
    elif rng.random() < 0.15:  # changes with the level, as a share of prompts does
        sd = sd * np.exp(rng.uniform(-0.8, 0.8) * (truth - truth.mean()) / unit)
    noise_kind = rng.random()
    noise = common
    if noise_kind < 0.2:
        noise = common / np.sqrt(rng.chisquare(3, n))
    elif noise_kind < 0.4:
        noise = correlate(common, rng.uniform(-0.3, 0.85))
    scores = truth + sd * noise
    if rng.random() < 0.12:  # the checkpoints differ in how good they are
        wobble = rng.uniform(0.02, 0.15) * unit * correlate(rng.standard_normal(n), rng.uniform(0.3, 0.8))
        scores = scores + (wobble if broken is None else wobble * np.minimum(broken.spread, 1.0))
    if rng.random() < 0.05:  # lucky at first
        at, luck = int(rng.integers(0, max(2, n // 10))), rng.uniform(0.1, 1.0) * unit
        scores[at:] += luck * rng.uniform(0, 0.6) ** np.arange(n - at)
    if rng.random() < 0.12:  # outliers, both ways or one
        far = rng.uniform(3, 12, n) * (rng.choice([-1.0, 1.0], n) if rng.random() < 0.6 else rng.choice([-1.0, 1.0]))
        hit = rng.random(n) < rng.uniform(0.005, 0.06)
        scores = np.where(hit, scores + far * np.maximum(sd, 0.01 * unit), scores)
    if rng.random() < 0.06:  # another grader, another eval set
        for _ in range(int(rng.choice([1, 1, 2]))):
            at = int(rng.integers(1, n))
            scores[at:] += rng.uniform(-0.8, 0.8) * unit
    if rng.random() < 0.1:  # a drop to a floor for one or two evals
        floor = truth.min() - rng.uniform(0.0, 2.0) * unit
        for _ in range(int(rng.choice([1, 1, 1, 2, 3]))):
            at = int(rng.integers(0, n))
            scores[at : at + int(rng.integers(1, 4))] = floor
    if rng.random() < 0.12:  # rounded
        grid = max(level, 0.01) * unit * rng.uniform(0.3, 2)
        scores = np.round(scores / grid) * grid
    stderrs = np.full(n, np.nan)
    if rng.random() < 0.4 and level > 0:
        stated_sd = sd * (rng.uniform(0.3, 0.9) if rng.random() < 1 / 3 else 1.0)
        stderrs = stated_sd * np.exp(0.05 * rng.standard_normal(n))
    return scores, stderrs
