"""Kinds of runs that turn: at their end they are below their best quality by more than the tolerance."""

from __future__ import annotations

import numpy as np
from numpy.random import Generator

from evalstop_lab.worlds.second_course import (
    Course,
    Reward,
    Scale,
    at_least_evals,
    bump,
    draw_fall,
    draw_place,
    draw_rise,
    draw_rising_proxy,
    kind,
    ramp,
    sum_steps,
)
from evalstop_lab.worlds.shapes import draw_log_uniform
from evalstop_lab.worlds.truth import Floats


@kind(turns=True)
def draw_slow_hack(rng: Generator, x: Floats) -> Course:
    """PPO gradually exploits the reward model: the score declines over the rest of the run."""
    onset = rng.uniform(0.2, 0.6)
    quality = draw_rise(rng, x, end=rng.uniform(0.6, 1.1)) - draw_log_uniform(rng, 0.15, 1.0) * draw_fall(rng, x, onset)
    return Course(quality, Reward.CLIMBS)


@kind(turns=True, shortest=15)
def draw_fast_hack(rng: Generator, x: Floats) -> Course:
    """The policy finds an exploit that every answer uses within a few evals; the proxy jumps."""
    onset = rng.uniform(0.2, 0.8)
    spread = draw_rise(rng, x, onset, onset + at_least_evals(x, rng.uniform(0.02, 0.1), 3))
    quality = draw_rise(rng, x, end=rng.uniform(0.5, 1.0)) - rng.uniform(0.4, 1.2) * spread
    return Course(quality, draw_rising_proxy(rng, x) + rng.uniform(0.4, 2.0) * spread)


@kind(turns=True, shortest=20)
def draw_early_hack(rng: Generator, x: Floats) -> Course:
    """A weak reward model is exploited in the first fifth of the run; the rest is decline."""
    onset = rng.uniform(0.05, 0.2)
    quality = draw_rise(rng, x, end=onset * rng.uniform(1.1, 1.8)) - rng.uniform(0.2, 1.2) * draw_fall(rng, x, onset)
    return Course(quality, Reward.CLIMBS)


@kind(turns=True, shortest=20)
def draw_late_hack(rng: Generator, x: Floats) -> Course:
    """A long rise, then a decline in the last quarter of the run."""
    onset = rng.uniform(0.65, 0.85)
    quality = draw_rise(rng, x, end=rng.uniform(0.7, 1.0)) - draw_log_uniform(rng, 0.13, 0.7) * draw_fall(rng, x, onset)
    return Course(quality, Reward.CLIMBS)


@kind(turns=True, shortest=300)
def draw_long_decay(rng: Generator, x: Floats) -> Course:
    """A run of hundreds of evals that loses 14 to 40 % of its gain, linearly, over its second half."""
    onset = rng.uniform(0.3, 0.6)
    quality = draw_rise(rng, x, end=onset) - rng.uniform(0.14, 0.4) * ramp(x, onset, 1.0)
    return Course(quality, Reward.CLIMBS if rng.random() < 0.7 else Reward.FOLLOWS)


@kind(turns=True, longest=15)
def draw_short_run_turns(rng: Generator, x: Floats) -> Course:
    """A run with about ten evals, one per epoch, that peaks in the middle."""
    onset = rng.uniform(0.2, 0.55)
    quality = draw_rise(rng, x, end=onset) - rng.uniform(0.3, 1.2) * draw_fall(rng, x, onset)
    return Course(quality, Reward.CLIMBS, policy_kl=rng.random() < 0.5)


@kind(turns=True)
def draw_epochs_overfit(rng: Generator, x: Floats) -> Course:
    """DPO over several epochs: each repetition of the data lowers the win rate, while margins keep growing."""
    epochs = int(rng.integers(3, 7))
    starts = np.arange(1, epochs) / epochs
    harmful = starts >= starts[int(rng.integers(0, max(1, epochs - 2)))]
    width = at_least_evals(x, 0.03, 2)
    falls = rng.uniform(0.1, 0.3, epochs - 1) * harmful
    losses = sum(size * ramp(x, start, start + width) for size, start in zip(falls, starts, strict=True))
    margins = x * rng.uniform(0.5, 1.5) + sum_steps(x, starts, rng.uniform(0.1, 0.3, epochs - 1))
    return Course(draw_rise(rng, x, end=rng.uniform(0.2, 0.4)) - losses, margins)


@kind(turns=True)
def draw_validation_loss_rises(rng: Generator, x: Floats) -> Course:
    """Supervised fine-tuning on too little data: the validation loss falls, then rises faster and faster."""
    onset, power = rng.uniform(0.15, 0.6), rng.uniform(1.0, 1.8)
    quality = draw_rise(rng, x, end=onset * 1.2) - rng.uniform(0.3, 2.0) * ramp(x, onset, 1.0) ** power
    return Course(quality, Reward.CLIMBS, Scale.LOSS, policy_kl=False)


@kind(turns=True, shortest=12)
def draw_subskill_forgotten(rng: Generator, x: Floats) -> Course:
    """The score is a mean over skills: most of them improve slowly while one is forgotten."""
    share, middle, width = rng.uniform(0.25, 0.5), rng.uniform(0.4, 0.75), rng.uniform(0.02, 0.1)
    forgotten = rng.uniform(0.8, 2.0) / (1 + np.exp(-(x - middle) / width))
    main, other = draw_rise(rng, x, end=rng.uniform(0.5, 1.0)), draw_rise(rng, x, end=0.5)
    return Course((1 - share) * main + share * (other - forgotten), Reward.FOLLOWS, policy_kl=rng.random() < 0.6)


@kind(turns=True, shortest=12)
def draw_entropy_collapse(rng: Generator, x: Floats) -> Course:
    """GRPO: the entropy collapses, the score stalls and then settles on a lower level."""
    stall = rng.uniform(0.2, 0.45)
    begin = stall + rng.uniform(0.02, 0.25)
    lost = rng.uniform(0.2, 0.8) * -np.expm1(-np.clip(x - begin, 0, None) / rng.uniform(0.04, 0.2))
    return Course(draw_rise(rng, x, end=stall) - lost, draw_rise(rng, x, end=stall) + 0.1 * x)


@kind(turns=True, shortest=12)
def draw_length_explosion(rng: Generator, x: Floats) -> Course:
    """Answers grow until they are truncated at the token limit: few at first, then most of them."""
    onset = rng.uniform(0.35, 0.75)
    growth = ramp(x, onset, 1.0)
    lost = rng.uniform(0.4, 1.1) * np.expm1(rng.uniform(1.0, 4.0) * growth) / np.expm1(3.0)
    quality = draw_rise(rng, x, end=rng.uniform(0.5, 0.9)) - np.minimum(lost, 1.3)
    return Course(quality, draw_rising_proxy(rng, x) - rng.uniform(0.0, 0.6) * np.minimum(lost, 1.0))


@kind(turns=True)
def draw_sudden_collapse(rng: Generator, x: Floats) -> Course:
    """An update diverges: within one to three evals the score drops to a low level and stays there."""
    at, width = draw_place(rng, x, 0.2, 0.8), int(rng.integers(1, 4))
    broken = np.clip((np.arange(len(x)) - at + 1) / width, 0, 1)
    rise = draw_rise(rng, x, end=rng.uniform(0.5, 1.2))
    floor = rng.uniform(-0.3, 0.7) * rise[at]
    quality = (1 - broken) * rise + broken * floor
    proxy = draw_rising_proxy(rng, x) * (1 - broken * rng.uniform(0.3, 1.2))
    return Course(quality, proxy)


@kind(turns=True, shortest=15)
def draw_partial_recovery(rng: Generator, x: Floats) -> Course:
    """A crash, after which the score recovers a third to three quarters of the loss."""
    at = rng.uniform(0.25, 0.65)
    depth, recovered_share = rng.uniform(0.4, 1.0), rng.uniform(0.35, 0.75)
    down = ramp(x, at, at + at_least_evals(x, 0.03, 2))
    recovery = draw_rise(rng, x, at + at_least_evals(x, 0.04, 3), rng.uniform(0.8, 1.0))
    return Course(draw_rise(rng, x, end=at) - depth * (down - recovered_share * recovery))


@kind(turns=True, shortest=15)
def draw_lower_second_peak(rng: Generator, x: Floats) -> Course:
    """Two peaks, the first one higher, and a decline at the end."""
    first, second = rng.uniform(0.18, 0.35), rng.uniform(0.55, 0.75)
    dip = rng.uniform(0.15, 0.5) * bump(x, first, second)
    quality = draw_rise(rng, x, end=first) - dip - rng.uniform(0.03, 0.12) * ramp(x, first, second)
    return Course(quality - rng.uniform(0.2, 0.8) * draw_fall(rng, x, second), Reward.CLIMBS)


@kind(turns=True, shortest=15)
def draw_higher_second_peak(rng: Generator, x: Floats) -> Course:
    """A dip that recovers, a higher peak, and then a turn."""
    first, second = rng.uniform(0.15, 0.3), rng.uniform(0.5, 0.7)
    rise = rng.uniform(0.5, 0.8) * draw_rise(rng, x, end=first) + rng.uniform(0.2, 0.5) * ramp(x, first, second)
    quality = rise - rng.uniform(0.1, 0.35) * bump(x, first, second)
    return Course(quality - draw_log_uniform(rng, 0.13, 0.9) * draw_fall(rng, x, second), Reward.CLIMBS)


@kind(turns=True, shortest=30)
def draw_falling_oscillation(rng: Generator, x: Floats) -> Course:
    """A cyclic learning rate: the score oscillates with it, around a falling level."""
    onset, cycles = rng.uniform(0.2, 0.5), rng.uniform(3, 9)
    swing = rng.uniform(0.04, 0.15) * np.sin(2 * np.pi * (cycles * x + rng.random())) * ramp(x, 0.05, onset)
    return Course(draw_rise(rng, x, end=onset) - rng.uniform(0.15, 0.8) * draw_fall(rng, x, onset) + swing)


@kind(turns=True, shortest=12)
def draw_warm_restart_breaks(rng: Generator, x: Floats) -> Course:
    """The learning rate is raised again and destroys what was learned; further training does not recover it."""
    at = rng.uniform(0.35, 0.75)
    lost = rng.uniform(0.3, 0.9) * draw_rise(rng, x, at, at + at_least_evals(x, rng.uniform(0.05, 0.2), 3))
    return Course(draw_rise(rng, x, end=at) - lost + rng.uniform(0.0, 0.1) * ramp(x, at + 0.2, 1.0), policy_kl=False)


@kind(turns=True)
def draw_data_mix_hurts(rng: Generator, x: Floats) -> Course:
    """The data mix changes to one that the eval does not reward: a quick drop, then a plateau or a slow decline."""
    at = rng.uniform(0.3, 0.75)
    step = draw_log_uniform(rng, 0.12, 0.6) * ramp(x, at, at + at_least_evals(x, 0.03, 2))
    drift = rng.choice([0.0, 0.3]) * rng.random() * ramp(x, at, 1.0)
    return Course(
        draw_rise(rng, x, end=rng.uniform(0.3, 1.0) * at) - step - drift, draw_rising_proxy(rng, x), policy_kl=False
    )


@kind(turns=True, shortest=15)
def draw_late_learner_hacks(rng: Generator, x: Floats) -> Course:
    """No improvement for a third of the run or more, a quick rise, then a decline."""
    wake, peak = rng.uniform(0.3, 0.5), rng.uniform(0.6, 0.75)
    quality = draw_rise(rng, x, wake, peak) - rng.uniform(0.15, 1.0) * draw_fall(rng, x, peak)
    return Course(quality, draw_rise(rng, x, wake, 1.0) + 0.2 * x)


@kind(turns=True)
def draw_hurt_from_the_start(rng: Generator, x: Floats) -> Course:
    """Fine-tuning degrades the base model from the first step: the score falls to a lower level."""
    rate = draw_log_uniform(rng, 1.0, 10.0)
    return Course(np.expm1(-rate * x) / -np.expm1(-rate), draw_rising_proxy(rng, x), policy_kl=rng.random() < 0.5)


@kind(turns=True, shortest=15)
def draw_turns_under_changed_grader(rng: Generator, x: Floats) -> Course:
    """The grader is replaced by a stricter or a more lenient one, and the quality turns too."""
    onset = rng.uniform(0.35, 0.65)
    quality = draw_rise(rng, x, end=onset) - rng.uniform(0.35, 1.0) * draw_fall(rng, x, onset)
    shift = sum_steps(x, rng.uniform(0.15, 0.8), rng.choice([-1, 1]) * rng.uniform(0.1, 0.4))
    return Course(quality, Reward.CLIMBS, shift=shift)


@kind(turns=True, shortest=20)
def draw_refreshed_reward_turns(rng: Generator, x: Floats) -> Course:
    """The reward model is retrained once or twice: the proxy jumps, the score recovers and then is hacked again."""
    onset = rng.uniform(0.25, 0.45)
    at = np.sort(rng.uniform(onset + 0.1, 0.85, int(rng.integers(1, 3))))
    helped = sum(rng.uniform(0.05, 0.25) * bump(x, turn, turn + 0.2, 1.5) for turn in at)
    quality = draw_rise(rng, x, end=onset) - rng.uniform(0.35, 1.0) * draw_fall(rng, x, onset) + helped
    return Course(quality, draw_rising_proxy(rng, x) * 1.5 - sum_steps(x, at, rng.uniform(0.2, 0.7, len(at))))


@kind(turns=True, shortest=20)
def draw_turns_again_after_restart(rng: Generator, x: Floats) -> Course:
    """The score collapses, the run is rolled back to a good checkpoint, and the score collapses again."""
    first, second = rng.uniform(0.25, 0.4), rng.uniform(0.6, 0.75)
    rolled_back = rng.uniform(first + 0.08, second - 0.08)
    broken = ramp(x, first, rolled_back) * (x < rolled_back)
    lost = rng.uniform(0.3, 0.9) * broken + rng.uniform(0.25, 1.0) * draw_fall(rng, x, second)
    quality = draw_rise(rng, x, end=first * 1.2) + 0.05 * ramp(x, rolled_back, second)
    return Course(quality - lost)
