"""Healthy kinds of runs: they end at their best quality, or within the tolerance of it."""

from __future__ import annotations

import numpy as np
from numpy.random import Generator

from evalstop_lab.worlds.noise import NoiseKind
from evalstop_lab.worlds.second_course import (
    Course,
    Reward,
    Scale,
    at_least_evals,
    bump,
    draw_place,
    draw_rise,
    draw_rising_proxy,
    kind,
    ramp,
    sum_steps,
)
from evalstop_lab.worlds.truth import Floats


@kind(turns=False)
def draw_steady_learner(rng: Generator, x: Floats) -> Course:
    """Still improving when the run ends."""
    return Course(draw_rise(rng, x, end=rng.uniform(1.0, 1.3)), policy_kl=rng.random() < 0.7)


@kind(turns=False)
def draw_levels_off(rng: Generator, x: Floats) -> Course:
    """A fast rise, then a plateau to the end."""
    return Course(draw_rise(rng, x, end=rng.uniform(0.1, 0.6)), Reward.CLIMBS)


@kind(turns=False, shortest=300)
def draw_long_plateau(rng: Generator, x: Floats) -> Course:
    """Hundreds of evals on one level after a short rise."""
    return Course(draw_rise(rng, x, end=rng.uniform(0.05, 0.3)) + rng.uniform(0.0, 0.05) * x, Reward.CLIMBS)


@kind(turns=False, longest=15)
def draw_short_run(rng: Generator, x: Floats) -> Course:
    """About ten evals of a run that ends while it still improves, or soon after."""
    return Course(draw_rise(rng, x, end=rng.uniform(0.5, 1.2)), policy_kl=rng.random() < 0.5)


@kind(turns=False)
def draw_never_learns(rng: Generator, x: Floats) -> Course:
    """The learning rate is far too low, or the reward has no variance: the scores are only noise."""
    quality = rng.uniform(0.005, 0.03) * draw_rise(rng, x)
    return Course(quality, quality + 0.3 * rng.standard_normal(len(x)))


@kind(turns=False)
def draw_grokking(rng: Generator, x: Floats) -> Course:
    """No improvement for half of the run or longer, then a steep rise."""
    wake = rng.uniform(0.35, 0.75)
    late = draw_rise(rng, x, wake, min(1.0, wake + rng.uniform(0.08, 0.3)))
    return Course(0.05 * x + 0.95 * late, 0.3 * late + rng.uniform(0.2, 0.8) * draw_rise(rng, x, end=0.6))


@kind(turns=False, shortest=12)
def draw_warm_up_falls_first(rng: Generator, x: Floats) -> Course:
    """The score falls for three to twenty evals of warm-up while the policy learns the new format of answers."""
    evals = min(int(rng.integers(3, 21)), len(x) // 3)
    begin, end = 0.0, evals / (len(x) - 1)
    depth = rng.uniform(0.1, 0.8)
    fallen = depth * ramp(x, begin, end * 0.7) * (1 - ramp(x, end, end + at_least_evals(x, 0.1, 3)))
    return Course(draw_rise(rng, x, end, rng.uniform(0.7, 1.1)) - fallen)


@kind(turns=False, shortest=15)
def draw_sags_within_tolerance(rng: Generator, x: Floats) -> Course:
    """After its peak the score loses a few percent of the gain, linearly, and no more."""
    peak = rng.uniform(0.2, 0.6)
    return Course(draw_rise(rng, x, end=peak) - rng.uniform(0.03, 0.085) * ramp(x, peak, 1.0), Reward.CLIMBS)


@kind(turns=False, shortest=30)
def draw_oscillates(rng: Generator, x: Floats) -> Course:
    """The learning rate is unstable: the score oscillates around its best level and ends within the tolerance."""
    peak, cycles, size = rng.uniform(0.2, 0.5), rng.uniform(2, 8), rng.uniform(0.05, 0.2)
    swing = size * np.sin(2 * np.pi * (cycles * x + rng.random())) * ramp(x, 0.0, peak)
    return Course(draw_rise(rng, x, end=peak) + swing)


@kind(turns=False, shortest=20)
def draw_curriculum_dips(rng: Generator, x: Floats) -> Course:
    """Each harder stage of a curriculum first lowers the score and then raises it above its earlier level."""
    starts = np.sort(rng.uniform(0.15, 0.7, int(rng.integers(1, 4))))
    width = at_least_evals(x, rng.uniform(0.06, 0.15), 3)
    dips = sum(rng.uniform(0.08, 0.35) * bump(x, start, start + width, 1.8) for start in starts)
    stages = sum(draw_rise(rng, x, start, min(1.0, start + 2 * width)) for start in starts)
    return Course(
        0.6 * draw_rise(rng, x, end=starts[0]) + 0.4 * stages / len(starts) - dips, policy_kl=rng.random() < 0.6
    )


@kind(turns=False, shortest=15)
def draw_data_mix_changes(rng: Generator, x: Floats) -> Course:
    """A new data mix lowers the score for about a fifth of the run; afterwards it is better than before."""
    at = rng.uniform(0.2, 0.6)
    dip = rng.uniform(0.12, 0.45) * bump(x, at, at + rng.uniform(0.12, 0.3), rng.uniform(1.0, 2.0))
    return Course(
        0.8 * draw_rise(rng, x, end=at) + 0.2 * draw_rise(rng, x, at) - dip, draw_rising_proxy(rng, x), policy_kl=False
    )


@kind(turns=False, shortest=25)
def draw_warm_restarts(rng: Generator, x: Floats) -> Course:
    """Cosine schedule with restarts: the score drops when the learning rate is raised and recovers as it decays."""
    cycles = int(rng.integers(2, 5))
    phase = (x * cycles) % 1.0
    later = (x * cycles >= 1) & (x < 1)
    dips = rng.uniform(0.06, 0.3) * later * 0.5 * (1 + np.cos(np.pi * np.minimum(phase * 1.3, 1.0)))
    return Course(draw_rise(rng, x, end=rng.uniform(0.5, 1.0)) - dips, policy_kl=False)


@kind(turns=False)
def draw_decay_lifts(rng: Generator, x: Floats) -> Course:
    """The learning rate is reduced late in the run, and the score rises from its plateau."""
    at, share = rng.uniform(0.5, 0.85), rng.uniform(0.15, 0.5)
    lift = draw_rise(rng, x, at, min(1.0, at + at_least_evals(x, 0.1, 2)))
    return Course((1 - share) * draw_rise(rng, x, end=rng.uniform(0.3, 0.5)) + share * lift)


@kind(turns=False, shortest=12)
def draw_rolled_back(rng: Generator, x: Floats) -> Course:
    """An update breaks the policy; some evals later the run is rolled back to its last good checkpoint."""
    at = draw_place(rng, x, 0.2, 0.7)
    back = min(at + int(rng.integers(2, 3 + max(1, len(x) // 12))), len(x) - 3)
    broken = np.zeros(len(x))
    broken[at:back] = rng.uniform(0.3, 1.0) * (1 - 0.5 ** np.arange(1, back - at + 1))
    quality = draw_rise(rng, x, end=rng.uniform(0.8, 1.1))
    return Course(quality - broken, quality - broken * rng.uniform(-0.5, 1.0))


@kind(turns=False, shortest=15)
def draw_spikes_recover(rng: Generator, x: Floats) -> Course:
    """One to four loss spikes, each of which lowers the score for a few evals without lasting effect."""
    lost = np.zeros(len(x))
    for _ in range(int(rng.integers(1, 5))):
        at, half_life = draw_place(rng, x, 0.1, 0.85), rng.uniform(0.5, 2.5)
        after = np.arange(len(x)) - at
        lost += rng.uniform(0.2, 0.9) * (after >= 0) * 0.5 ** (np.maximum(after, 0) / half_life)
    return Course(draw_rise(rng, x, end=rng.uniform(0.4, 1.0)) - np.minimum(lost, 1.0))


@kind(turns=False, shortest=15)
def draw_long_dip_recovers(rng: Generator, x: Floats) -> Course:
    """The score is below its first peak for 20 to 40 % of the run, until the policy finds a better strategy."""
    first = rng.uniform(0.15, 0.35)
    end = first + rng.uniform(0.2, 0.4)
    dip = rng.uniform(0.12, 0.3) * bump(x, first, end)
    return Course(0.75 * draw_rise(rng, x, end=first) + 0.25 * draw_rise(rng, x, (first + end) / 2, 1.0) - dip)


@kind(turns=False)
def draw_reward_model_refreshed(rng: Generator, x: Floats) -> Course:
    """The reward model is retrained: the proxy drops, while the score keeps rising or stays."""
    at = np.sort(rng.uniform(0.2, 0.8, int(rng.integers(1, 4))))
    proxy = 1.5 * draw_rising_proxy(rng, x) - sum_steps(x, at, rng.uniform(0.3, 1.0, len(at)))
    return Course(draw_rise(rng, x, end=rng.uniform(0.5, 1.2)), proxy)


@kind(turns=False)
def draw_proxy_falls_for_good_reason(rng: Generator, x: Floats) -> Course:
    """A length penalty or harder prompts lower the reward during training, while the eval score rises."""
    at = rng.uniform(0.1, 0.6)
    proxy = 0.5 * draw_rise(rng, x, end=at) - rng.uniform(0.3, 1.5) * ramp(x, at, rng.uniform(0.7, 1.0))
    return Course(draw_rise(rng, x, end=rng.uniform(0.6, 1.2)), proxy)


@kind(turns=False)
def draw_failed_evals(rng: Generator, x: Floats) -> Course:
    """The eval job sometimes fails and posts 0, for one eval or two in a row."""
    failed: set[int] = set()
    for _ in range(int(rng.integers(1, 2 + min(4, len(x) // 15)))):
        at = draw_place(rng, x, 0.1, 1.0)
        failed.update(range(at, min(at + int(rng.integers(1, 3)), len(x))))
    quality = draw_rise(rng, x, end=rng.uniform(0.3, 1.1))
    return Course(quality, scale=Scale.SHARE, failed=tuple(sorted(failed)), noise=NoiseKind.GAUSSIAN)


@kind(turns=False)
def draw_stricter_grader(rng: Generator, x: Floats) -> Course:
    """A stricter grader is used from one eval on: the measured score drops, the quality does not."""
    shift = sum_steps(x, rng.uniform(0.25, 0.8), -rng.uniform(0.12, 0.6))
    return Course(draw_rise(rng, x, end=rng.uniform(0.4, 1.1)), shift=shift)


@kind(turns=False)
def draw_eval_set_changed(rng: Generator, x: Floats) -> Course:
    """Another eval set is used from one eval on: the scores have another level, mostly a higher one, and spread."""
    size = -rng.uniform(0.06, 0.42) if rng.random() < 0.3 else rng.uniform(0.1, 0.7)
    shift = sum_steps(x, rng.uniform(0.2, 0.8), size)
    return Course(draw_rise(rng, x, end=rng.uniform(0.3, 1.0)), shift=shift, stretch=rng.uniform(0.6, 1.4))


@kind(turns=False, shortest=20)
def draw_drifting_noise(rng: Generator, x: Floats) -> Course:
    """A run on a plateau whose eval errors are strongly autocorrelated and look like slow falls and rises."""
    return Course(draw_rise(rng, x, end=rng.uniform(0.15, 0.6)), Reward.CLIMBS, noise=NoiseKind.AR1)
