"""The contenders of `make bench-detection`: detectors, also of other libraries, policies, and an oracle."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from evalstop_detectors import DETECTORS, Detector, Kind, Policy
from evalstop_detectors.policy.calibration import default_thresholds

from evalstop_lab.calibrate.evidence import Records, record_evidence
from evalstop_lab.report import format_percent
from evalstop_lab.stopbench.judging import judge_world
from evalstop_lab.stopbench.libraries import LIBRARIES
from evalstop_lab.stopbench.rules import JUDGED_POLICIES, PolicyRule
from evalstop_lab.worlds import Label, World

# non_finite watches faults that worlds do not have; river's detectors are listed with those of other libraries.
_NOT_RUN = frozenset({"non_finite", "river_drift"})

AS_SHIPPED = "as shipped"
STATED = "default"


@dataclass(frozen=True)
class Contender:
    """A rule that raises an alarm level over a run.

    `points`: its own alarm levels at which it stops, by name. If it is `calibrated`, levels are also found by
    calibration. `compared`: whether it is also evaluated without planned lengths and on the second suite.
    """

    name: str
    run: Callable[[World], Records]
    points: Mapping[str, float] = field(default_factory=dict)
    calibrated: bool = False
    compared: bool = False


def list_contenders() -> list[Contender]:
    """List all detectors of the catalog, all policies, and the contenders to compare them with."""
    k_decline = partial(_run_detector, DETECTORS["k_decline"]())
    entries = [Contender(f"k_decline k={k}", k_decline, {AS_SHIPPED: float(k)}, compared=True) for k in (3, 5)]
    for name, detector in list_detectors().items():
        stop_at = default_thresholds(detector).stop_at
        stated = {} if stop_at is None else {STATED: stop_at}
        compared = name in ("posterior", "plateau_drop")
        entries.append(Contender(name, partial(_run_detector, detector), stated, True, compared))
    entries += [
        Contender(f"policy {name}", partial(_run_policy, policy), {AS_SHIPPED: 1.0}, compared=True)
        for name, policy in JUDGED_POLICIES.items()
    ]
    points = {format_percent(rate, 0): math.log(1 / rate) for rate in (0.01, 0.05)}
    return [*entries, Contender("oracle", run_oracle, points)]


def list_detectors() -> dict[str, Detector[Any]]:
    """The detectors of the catalog with their default parameters, and those of other libraries, by name."""
    own = {name: detector() for name, detector in DETECTORS.items() if name not in _NOT_RUN}
    return own | {name: detector for name, (detector, _) in LIBRARIES.items()}


def run_oracle(world: World) -> Records:
    """The sequential likelihood ratio of an oracle that knows the curve and the noise, but not whether the run turned.

    After the peak it compares the true curve with one that stays at the peak. By Ville's inequality, stopping at
    ln(1/alpha) stops a run that stays there with a probability of at most alpha. It stops no healthy run, because it
    knows that every dip recovers.
    """
    truth, sd = world.truth, world.truth.noise_sd
    if truth.label is not Label.HACKING or sd is None:
        return Records(Kind.COUNT, (), ())
    steps: list[int] = []
    alarms: list[float] = []
    ratio = 0.0
    top = truth.eval_scores[truth.peak]
    for index in range(truth.peak + 1, len(world.steps) - 1):
        score, curve = world.eval_scores[index], truth.eval_scores[index]
        if np.isfinite(score) and curve != top:
            gain = (score - top) ** 2 - (score - curve) ** 2
            ratio = math.inf if sd == 0 else ratio + float(gain) / (2 * sd**2)
            if ratio > 0 and (not alarms or ratio > alarms[-1]):
                steps.append(int(world.steps[index]))
                alarms.append(ratio)
    return Records(Kind.COUNT, tuple(steps), tuple(alarms))


def _run_detector(detector: Detector[Any], world: World) -> Records:
    return record_evidence(detector, world.observations(), world.last_step)


def _run_policy(policy: Policy, world: World) -> Records:
    stop = judge_world(policy.name, partial(PolicyRule, policy), world).stop_step
    return Records(Kind.COUNT, (), ()) if stop is None else Records(Kind.COUNT, (stop,), (1.0,))
