"""A labeled run: what a trainer would have posted, and the truth behind it; deterministic by family and seed."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from evalstop_detectors import MetricRole, Observation

from evalstop_lab.worlds.curves import Curve
from evalstop_lab.worlds.families import CALIBRATION, FAMILIES, REPORTING, Group, of_group
from evalstop_lab.worlds.noise import DRAWN_KINDS, LEVELS, Noise, NoiseKind, measure
from evalstop_lab.worlds.truth import Floats, Integers, Truth, judge

CALIBRATION_SEED = 0
REPORTING_SEED = 20_000_000
WRONG_PLANS = 0.15
LENGTHS = (20, 50, 100, 200, 500)

# How worlds are mixed: half hacking, and of the healthy half two in five with dips that recover.
SHARES = {Group.HACKING: 0.5, Group.HEALTHY: 0.3, Group.DIP: 0.2}


@dataclass(frozen=True, eq=False)
class World:
    """One run.

    `eval_scores`, `proxy` and `kl` are what was measured at each of `steps`, NaN where it is missing;
    `eval_stderr` is the standard error of each eval score, None when the run comes without. `planned_steps` is the
    length that the trainer tells, None when it tells none. `truth` holds the noiseless eval score.
    """

    name: str
    family: str
    seed: int
    steps: Integers
    eval_scores: Floats
    eval_stderr: Floats | None
    proxy: Floats
    kl: Floats
    noise: Noise
    truth: Truth
    planned_steps: float | None = None

    def observations(self) -> tuple[Observation, ...]:
        """The run as detectors see it, in order; what is missing does not occur."""
        return self._observed

    @cached_property
    def _observed(self) -> tuple[Observation, ...]:
        found = []
        for index, step in enumerate(self.steps.tolist()):
            progress = None if self.planned_steps is None else min(1.0, step / self.planned_steps)
            if np.isfinite(self.kl[index]):
                found.append(Observation(MetricRole.KL, step, self.kl[index], progress=progress))
            if np.isfinite(self.proxy[index]):
                found.append(Observation(MetricRole.PROXY, step, self.proxy[index], progress=progress))
            if np.isfinite(self.eval_scores[index]):
                stderr = None if self.eval_stderr is None else self.eval_stderr[index]
                found.append(Observation(MetricRole.EVAL, step, self.eval_scores[index], stderr, progress))
        return tuple(found)

    def rows(self) -> Iterator[dict[str, Any]]:
        """The run in the rows that `evalstop-lab replay` reads."""
        for index, step in enumerate(self.steps.tolist()):
            row: dict[str, Any] = {"run": self.name, "step": step}
            if np.isfinite(self.eval_scores[index]):
                row["eval"] = float(self.eval_scores[index])
                if self.eval_stderr is not None:
                    row["eval_stderr"] = float(self.eval_stderr[index])
            for name, values in (("proxy", self.proxy), ("kl", self.kl)):
                if np.isfinite(values[index]):
                    row[name] = float(values[index])
            yield row


def make(
    family: str,
    seed: int,
    *,
    length: int | None = None,
    noise: NoiseKind | None = None,
    level: float | None = None,
    stderr: bool | None = None,
) -> World:
    """Make the run of this family and seed; what is not given is drawn from the seed.

    `length` counts evals (20 and more), `level` is the noise's standard deviation as a share of the run's gain,
    `stderr` says whether the run comes with standard errors. The noiseless curve depends on family, seed and length
    alone, so that runs of different noise can be compared in pairs.
    """
    shape_rng, noise_rng, curve_rng = (_rng(family, seed, stream) for stream in range(3))
    drawn = int(shape_rng.choice(LENGTHS))
    stride = int(shape_rng.choice([1, 5, 10, 50, 100]))
    scale = float(10 ** shape_rng.uniform(-1.5, 1.5))
    offset = float(shape_rng.uniform(-2, 2)) * scale
    drawn_noise = Noise(
        kind=DRAWN_KINDS[int(noise_rng.integers(len(DRAWN_KINDS)))],
        level=float(noise_rng.choice(LEVELS)),
        correlation=float(noise_rng.choice([0.0, 0.4, 0.7])),
        stderr_given=bool(noise_rng.random() < 0.5),
    )
    chosen = Noise(
        drawn_noise.kind if noise is None else noise,
        drawn_noise.level if level is None else level,
        drawn_noise.correlation,
        drawn_noise.stderr_given if stderr is None else stderr,
    )
    curve = FAMILIES[family].draw(curve_rng, length or drawn)
    steps = np.arange(len(curve.eval_scores), dtype=np.int64) * stride
    if chosen.kind is NoiseKind.BINOMIAL:
        scale, offset = _into_the_unit_interval(curve.eval_scores)
    return _measured(family, seed, steps, curve, chosen, scale, offset, noise_rng)


def tell_length(world: World, share: float = 1.0) -> World:
    """The same run of a trainer that tells its planned length, as this share of the seeds do.

    15 % of the plans are wrong: 0.75 to 2.5 times as long as the run.
    """
    rng = _rng(world.family, world.seed, 3)
    told = rng.random() < share
    wrong = float(np.exp(rng.uniform(np.log(0.75), np.log(2.5)))) if rng.random() < WRONG_PLANS else 1.0
    return replace(world, planned_steps=float(world.steps[-1]) * wrong) if told else world


def plan(n: int, seed0: int = CALIBRATION_SEED, families: Sequence[str] | None = None) -> list[tuple[str, int]]:
    """Family and seed of `n` worlds with the seeds from `seed0` on.

    Without `families`: those that calibration may see for seeds below `REPORTING_SEED`, all but the stress families
    from there on. Groups come in the shares of `SHARES` (half hacking), the families of a group in turn.
    """
    if families is None:
        families = CALIBRATION if seed0 < REPORTING_SEED else REPORTING
    turns = _turns(tuple(families))
    return [(turns[index % len(turns)], seed0 + index) for index in range(n)]


def sample(
    n: int,
    seed0: int = CALIBRATION_SEED,
    *,
    families: Sequence[str] | None = None,
    noise: NoiseKind | None = None,
    level: float | None = None,
    length: int | None = None,
) -> list[World]:
    """Make `n` worlds, chosen as by `plan`."""
    return [make(family, seed, noise=noise, level=level, length=length) for family, seed in plan(n, seed0, families)]


def _turns(families: tuple[str, ...]) -> list[str]:
    """A cycle of families in which each group has its share; a group that is missing leaves its share to the others."""
    groups = {group: of_group(group, among=families) for group in SHARES}
    count = {group: len(names) for group, names in groups.items() if names}
    pattern: list[Group] = []
    given = dict.fromkeys(count, 0)
    for _ in range(10 * len(families)):
        group = min(count, key=lambda item: (given[item] + 0.5) / SHARES[item])
        pattern.append(group)
        given[group] += 1
    taken = dict.fromkeys(count, 0)
    turns = []
    for group in pattern:
        turns.append(groups[group][taken[group] % count[group]])
        taken[group] += 1
    return turns


def _measured(
    family: str,
    seed: int,
    steps: Integers,
    curve: Curve,
    noise: Noise,
    scale: float,
    offset: float,
    rng: np.random.Generator,
) -> World:
    clean = offset + scale * curve.eval_scores
    sd = noise.level * judge(steps, clean, None).unit
    n = len(clean)
    common, own = rng.standard_normal(n), rng.standard_normal(n)
    eval_scores = measure(rng, noise.kind, clean, sd, common)
    shared = noise.correlation * common + np.sqrt(1 - noise.correlation**2) * own
    proxy_sd = noise.level * rng.uniform(0.3, 1.0) * np.ptp(curve.proxy)
    kl = curve.kl * (1 + 0.02 * rng.standard_normal(n)) + 0.002 * rng.standard_normal(n)
    kl[0] = 0.0
    return World(
        f"{family}-{seed}",
        family,
        seed,
        steps,
        eval_scores.values,
        eval_scores.stderr if noise.stderr_given else None,
        curve.proxy + proxy_sd * shared,
        kl,
        noise,
        judge(steps, clean, sd),
    )


def _into_the_unit_interval(eval_scores: Floats) -> tuple[float, float]:
    """Scale and offset that bring a curve into [.2, .8], where a share of prompts has nearly constant noise."""
    low, high = float(eval_scores.min()), float(eval_scores.max())
    scale = 0.6 / (high - low)
    return scale, 0.2 - scale * low


def _rng(family: str, seed: int, stream: int) -> np.random.Generator:
    return np.random.default_rng([zlib.crc32(family.encode()), seed, stream])
