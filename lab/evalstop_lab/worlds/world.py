"""Draws labeled runs: the metrics that a trainer would post and the truth, deterministic by family and seed."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from evalstop_detectors import MetricRole, Observation

from evalstop_lab.worlds.families import CALIBRATION, FAMILIES, REPORTING, Group, list_families
from evalstop_lab.worlds.noise import LEVELS, NoiseKind, add_noise
from evalstop_lab.worlds.truth import Floats, Integers, Truth, label_curve

CALIBRATION_SEED = 0
REPORTING_SEED = 20_000_000
WRONG_PLANS = 0.15
LENGTHS = (20, 50, 100, 200, 500)

# The shares of the groups: half of the runs are hacking; of the healthy ones two in five have dips that recover.
SHARES = {Group.HACKING: 0.5, Group.HEALTHY: 0.3, Group.DIP: 0.2}


@dataclass(frozen=True, eq=False)
class PromptScores:
    """The scores of a run's checkpoints on the same prompts, with which it answers requests to evaluate now.

    `means` are by eval and prompt, [evals, prompts], `sds` the standard deviations of an eval's single texts. Each of
    the `texts` of an eval has its own score; every prompt has as many of them.
    """

    means: Floats
    sds: Floats
    texts: int

    def compare(self, eval_index: int, other: int) -> tuple[float, float]:
        """The mean score of an eval less that of another, and the standard error by the differences of single texts."""
        difference = float(self.means[eval_index].mean() - self.means[other].mean())
        # Texts of one prompt are independent: their scores have in common only what the prompt's means have.
        covariance = np.cov(self.means[eval_index], self.means[other])[0, 1]
        variance = self.sds[eval_index] ** 2 + self.sds[other] ** 2 - 2 * covariance
        return difference, math.sqrt(max(float(variance), 0.0) / self.texts)


@dataclass(frozen=True, eq=False)
class World:
    """One run.

    `eval_scores`, `proxy` and `kl` are the measured values at each of `steps`, NaN where one is missing. `eval_stderr`
    is the standard error of each eval score, None if the run does not report it. `planned_steps` is the run's planned
    length, None if the trainer does not report it. `truth` has the noiseless eval scores. `prompt_scores` are those of
    a recorded run whose checkpoints were evaluated on the same prompts.
    """

    name: str
    family: str
    seed: int
    steps: Integers
    eval_scores: Floats
    eval_stderr: Floats | None
    proxy: Floats
    kl: Floats
    truth: Truth
    planned_steps: float | None = None
    prompt_scores: PromptScores | None = None

    @property
    def last_step(self) -> int:
        return int(self.steps[-1])

    def observations(self) -> list[Observation]:
        """The run's observations in order, without missing values."""
        observations = []
        for index, step in enumerate(self.steps.tolist()):
            progress = None if self.planned_steps is None else min(1.0, step / self.planned_steps)
            if np.isfinite(self.kl[index]):
                observations.append(Observation(MetricRole.KL, step, self.kl[index], progress=progress))
            if np.isfinite(self.proxy[index]):
                observations.append(Observation(MetricRole.PROXY, step, self.proxy[index], progress=progress))
            if np.isfinite(self.eval_scores[index]):
                stderr = None if self.eval_stderr is None else self.eval_stderr[index]
                observations.append(Observation(MetricRole.EVAL, step, self.eval_scores[index], stderr, progress))
        return observations


def draw_world(
    family: str,
    seed: int,
    *,
    length: int | None = None,
    noise: NoiseKind | None = None,
    level: float | None = None,
    stderr: bool | None = None,
) -> World:
    """Draw the run of this family and seed; parameters that are None are drawn too.

    `length`: the number of evals, at least 20. `level`: the noise's standard deviation as a share of the run's gain.
    `stderr`: whether the run reports standard errors. The noiseless curve depends only on family, seed and length, so
    that runs with different noise can be compared in pairs.
    """
    shape_rng, noise_rng, curve_rng = (_rng(family, seed, stream) for stream in range(3))
    drawn = int(shape_rng.choice(LENGTHS))
    stride = int(shape_rng.choice([1, 5, 10, 50, 100]))
    scale = float(10 ** shape_rng.uniform(-1.5, 1.5))
    offset = float(shape_rng.uniform(-2, 2)) * scale
    drawn_kind = tuple(NoiseKind)[int(noise_rng.integers(len(NoiseKind)))]
    drawn_level = float(noise_rng.choice(LEVELS))
    correlation = float(noise_rng.choice([0.0, 0.4, 0.7]))  # of the noise of eval and proxy
    drawn_stderr = bool(noise_rng.random() < 0.5)
    kind, level = noise or drawn_kind, drawn_level if level is None else level
    curve = FAMILIES[family].draw(curve_rng, np.linspace(0, 1, length or drawn))
    n = len(curve.eval_scores)
    steps = np.arange(n, dtype=np.int64) * stride
    if kind is NoiseKind.BINOMIAL:
        # To [0.2, 0.8], where a share of prompts has nearly constant noise.
        lowest = float(curve.eval_scores.min())
        scale = 0.6 / (float(curve.eval_scores.max()) - lowest)
        offset = 0.2 - scale * lowest
    clean = offset + scale * curve.eval_scores
    sd = level * label_curve(steps, clean, None).unit
    common_noise, own_noise = noise_rng.standard_normal(n), noise_rng.standard_normal(n)
    measured = add_noise(noise_rng, kind, clean, sd, common_noise)
    shared = correlation * common_noise + np.sqrt(1 - correlation**2) * own_noise
    proxy_sd = level * noise_rng.uniform(0.3, 1.0) * np.ptp(curve.proxy)
    kl = curve.kl * (1 + 0.02 * noise_rng.standard_normal(n)) + 0.002 * noise_rng.standard_normal(n)
    kl[0] = 0.0
    return World(
        f"{family}-{seed}",
        family,
        seed,
        steps,
        measured.values,
        measured.stderr if (drawn_stderr if stderr is None else stderr) else None,
        curve.proxy + proxy_sd * shared,
        kl,
        label_curve(steps, clean, sd),
    )


def add_planned_steps(world: World, share: float = 1.0) -> World:
    """Add the planned length, as a trainer would report it, for this share of the seeds.

    15 % of the plans are wrong: 0.75 to 2.5 times the length of the run.
    """
    rng = _rng(world.family, world.seed, 3)
    is_reported = rng.random() < share
    factor = float(np.exp(rng.uniform(np.log(0.75), np.log(2.5)))) if rng.random() < WRONG_PLANS else 1.0
    return replace(world, planned_steps=float(world.steps[-1]) * factor) if is_reported else world


def plan_worlds(n: int, seed0: int = CALIBRATION_SEED, families: Sequence[str] | None = None) -> list[tuple[str, int]]:
    """The families and seeds of `n` worlds, with seeds from `seed0` on.

    `families` defaults to the calibration families for seeds below `REPORTING_SEED`, and to all otherwise. Groups have
    the shares of `SHARES`; families of a group take turns.
    """
    if families is None:
        families = CALIBRATION if seed0 < REPORTING_SEED else REPORTING
    turns = _build_cycle(tuple(families))
    return [(turns[index % len(turns)], seed0 + index) for index in range(n)]


def _build_cycle(families: tuple[str, ...]) -> list[str]:
    """A cycle of families in which each group has its share; the share of a missing group goes to the others."""
    groups = {group: list_families(group, among=families) for group in SHARES}
    count = {group: len(names) for group, names in groups.items() if names}
    pattern: list[Group] = []
    group_counts = dict.fromkeys(count, 0)
    for _ in range(10 * len(families)):
        group = min(count, key=lambda item: (group_counts[item] + 0.5) / SHARES[item])
        pattern.append(group)
        group_counts[group] += 1
    turns_taken = dict.fromkeys(count, 0)
    turns = []
    for group in pattern:
        turns.append(groups[group][turns_taken[group] % count[group]])
        turns_taken[group] += 1
    return turns


def _rng(family: str, seed: int, stream: int) -> np.random.Generator:
    return np.random.default_rng([zlib.crc32(family.encode()), seed, stream])
