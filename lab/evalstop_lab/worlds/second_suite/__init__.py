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

import numpy as np

from evalstop_lab.worlds.noise import Noise
from evalstop_lab.worlds.second_suite.course import Kind, draw_log_uniform
from evalstop_lab.worlds.second_suite.healthy import HEALTHY
from evalstop_lab.worlds.second_suite.measure import (
    add_variation,
    draw_kl,
    draw_planned_steps,
    draw_proxy,
    draw_steps,
    evaluate_course,
)
from evalstop_lab.worlds.second_suite.turning import TURNING
from evalstop_lab.worlds.truth import Label, Truth, label_curve
from evalstop_lab.worlds.world import World

__all__ = ["SECOND_SUITE", "Kind", "draw_world"]

SECOND_SUITE: dict[str, Kind] = {**TURNING, **HEALTHY}

ATTEMPTS = 1000
EVALS_AFTER_PEAK = 2  # with fewer no rule could stop the run before its end


def draw_world(kind: str, seed: int) -> World:
    """Draw the run of this kind and seed; raises KeyError for an unknown kind.

    A run whose label differs from the one that its kind declares is drawn again.
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
    steps = draw_steps(rng, count)
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
