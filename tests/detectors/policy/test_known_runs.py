"""Verdicts of the shipped policies on short runs whose right verdict is known."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from evalstop_detectors import POLICIES, Call, Member, MetricRole, Observation, Policy, Verdict, replay
from evalstop_detectors.detectors.floor import Floor
from evalstop_detectors.detectors.k_decline import KDecline

WARMUP_DIP = [3.10, 3.112, 3.125, 3.130, 3.108, 3.09, 3.05, 3.02, 3.00, 2.99]
BROKEN_AT_THE_SECOND = [17.9, 29.1, 31.0, 30.2, 30.8, 28.1]


def judge(policy: str | Policy, scores: Sequence[float], planned: int | None) -> Verdict:
    """The verdict on evals at steps 1, 2, ... of a run of so many planned steps."""
    observations = [
        Observation(MetricRole.EVAL, step, score, progress=None if planned is None else min(step / planned, 1.0))
        for step, score in enumerate(scores, start=1)
    ]
    return replay(POLICIES[policy] if isinstance(policy, str) else policy, observations).verdict


def vary(scores: Sequence[float], seed: int) -> list[float]:
    """The scores with another unit and origin, and noise of a hundredth of their range."""
    rng = np.random.default_rng(seed)
    noisy = np.asarray(scores) + 0.01 * np.ptp(scores) * rng.standard_normal(len(scores))
    return [float(score) for score in rng.uniform(0.1, 10) * noisy + rng.normal(0, 10)]


def negate(losses: Sequence[float]) -> list[float]:
    return [-loss for loss in losses]


@pytest.mark.parametrize("policy", ["default", "early", "cautious"])
@pytest.mark.parametrize("seed", range(10))
def test_dip_in_the_warmup_is_no_turn(policy: str, seed: int) -> None:
    """A loss that rises for three evals from the first one on and then falls to the end of a plan of 10 evals."""
    scores = negate(WARMUP_DIP)
    assert judge(policy, vary(scores, seed) if seed else scores, 10).verdict is not Call.STOP


@pytest.mark.parametrize("evals", [8, 10, 12, 15])
@pytest.mark.parametrize("policy", ["default", "early"])
def test_three_declines_at_the_start_stop_at_most_one_run_in_fifty(policy: str, evals: int) -> None:
    """The eval falls by 1 in three evals, then rises to +3."""
    rng = np.random.default_rng(evals)
    curve = np.concatenate([[0, -1 / 3, -2 / 3], np.linspace(-1, 3, evals - 3)])
    runs = [curve + 0.05 * rng.standard_normal(evals) for _ in range(60)]
    assert sum(judge(policy, run[:-1].tolist(), evals).stops for run in runs) <= 1


@pytest.mark.parametrize("planned", [6, 44])
@pytest.mark.parametrize("policy", ["default", "early"])
def test_run_that_breaks_at_its_second_eval_is_not_stopped_before_the_sixth(policy: str, planned: int) -> None:
    """A word error rate that jumps at once: suspect under a plan of six evals, and no stop yet."""
    verdict = judge(policy, negate(BROKEN_AT_THE_SECOND[:5]), planned)
    assert verdict.verdict is (Call.SUSPECT if planned == 6 else Call.CONTINUE)
    if planned == 6:
        assert "no stop: the score fell from its first eval on" in verdict.reason
        assert verdict.turn_step == 1


def test_counting_rules_judge_the_first_evals() -> None:
    """Three declines from the first eval on stop a run under a policy that asks for three declines."""
    assert judge("paper", [0.9, 0.8, 0.7, 0.6], None).step == 4
    floor = Floor(k=1)
    assert judge(Policy("floor", (Member(floor, floor.thresholds),)), [0.9, 0.9, 0.9, 0.1], None).step == 4


def test_counting_rules_must_suffice_for_an_early_stop() -> None:
    """Their calls count alone while the score has fallen from the first eval on."""
    decline, posterior = KDecline(k=3), POLICIES["early"].members[0]
    policy = Policy("both", (Member(decline, decline.thresholds), posterior), at_least=2)
    assert judge(policy, [0.9, 0.8, 0.7, 0.6, 0.5], 6).verdict is Call.SUSPECT
    assert judge(policy, [0.9, 0.8, 0.7, 0.6, 0.5, 0.4], 6).step == 6
