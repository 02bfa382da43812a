"""Verdicts of the shipped policies on short runs whose right verdict is known."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from evalstop_detectors import (
    POLICIES,
    Call,
    Member,
    MetricRole,
    Observation,
    Policy,
    Score,
    Scores,
    Thresholds,
    Verdict,
    choose_best,
    replay,
)
from evalstop_detectors.detectors.k_decline import KDecline

WARMUP_DIP = [3.10, 3.112, 3.125, 3.130, 3.108, 3.09, 3.05, 3.02, 3.00, 2.99]
BROKEN_AT_THE_SECOND = [17.9, 29.1, 31.0, 30.2, 30.8, 28.1]
OVERFIT = [6.9, 2.6, 1.6, 1.5, 1.4, 1.3, 1.2, 1.1, 0.95, 0.93, 1.0, 1.1, 1.15, 1.2, 1.15, 1.2, 1.3, 1.35, 1.4, 1.5]
OVERFIT += [1.6, 1.7, 1.8, 1.9, 2.0, 2.1, 2.2, 2.3, 2.4]
LUCKY_SECOND = [-90.0, -12, -22, -40, -33, -48, -43, -40, -37, -49, -41, -44, -50, -33]
SHORT_OVERFIT = [5.8, 3.7, 3.45, 3.6, 4.2, 4.4, 4.6, 4.9]


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


def choose_step(scores: Sequence[float]) -> int:
    """The step of the best checkpoint, where each eval has one."""
    best = choose_best(
        Scores()
        .add_scores([Score(step, score) for step, score in enumerate(scores, start=1)])
        .add_checkpoints(dict.fromkeys(range(1, len(scores) + 1), ""))
    )
    assert best is not None
    return best.step


def negate(losses: Sequence[float]) -> list[float]:
    return [-loss for loss in losses]


@pytest.mark.parametrize("policy", ["default", "early", "cautious"])
@pytest.mark.parametrize("seed", range(10))
def test_dip_in_the_warmup_is_no_turn(policy: str, seed: int) -> None:
    """A loss that rises for three evals from the first one on and then falls to the end of a plan of 10 evals."""
    scores = negate(WARMUP_DIP)
    assert judge(policy, vary(scores, seed) if seed else scores, 10).verdict is not Call.STOP


@pytest.mark.parametrize("evals", [8, 12, *(pytest.param(evals, marks=pytest.mark.nightly) for evals in (10, 15))])
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
    """A word error rate that jumps at once: suspect under a plan of six evals, else from the sixth on; no stop yet."""
    verdict = judge(policy, negate(BROKEN_AT_THE_SECOND[:5]), planned)
    assert verdict.verdict is (Call.SUSPECT if planned == 6 else Call.CONTINUE)
    if planned == 6:
        assert "no stop: the score fell from its first eval on" in verdict.reason
        assert verdict.turn_step == 1
    assert choose_step(negate(BROKEN_AT_THE_SECOND)) == 1


@pytest.mark.parametrize("planned", [None, 6, 44])
@pytest.mark.parametrize("policy", ["default", "early"])
@pytest.mark.parametrize("seed", range(5))
def test_run_whose_first_eval_is_far_above_all_others_is_suspect(policy: str, planned: int | None, seed: int) -> None:
    """From the sixth eval on, and until an eval comes near the first again; a rising or noisy run is not."""
    broken = vary(negate(BROKEN_AT_THE_SECOND), seed)
    verdict = judge(policy, broken, planned)
    assert (verdict.verdict, verdict.turn_step) == (Call.SUSPECT, 1)
    assert "the first eval is the best, and all 5 later ones are far below it" in verdict.reason
    notes = [item.note for item in judge(policy, [*broken, broken[0]], None).evidence]
    assert not any("first eval is the best" in note for note in notes)
    noise = np.random.default_rng(seed).standard_normal(12).tolist()
    assert not any("first eval is the best" in item.note for item in judge(policy, noise, None).evidence)


def list_warm_up(scores: Sequence[float], peak: int, planned: int) -> list[Observation]:
    """Evals at steps 10, 20, ... of a run whose learning rate, logged at every fifth step, rises until `peak`."""
    steps = range(5, 10 * len(scores) + 1, 5)
    rates = [Observation(MetricRole.LEARNING_RATE, step, min(step / peak, 2.0 - step / peak)) for step in steps]
    evals = [
        Observation(MetricRole.EVAL, 10 * place, score, progress=place / planned)
        for place, score in enumerate(scores, start=1)
    ]
    return sorted([*rates, *evals], key=lambda item: item.order)


LONG_DIP = [*np.linspace(0, -1, 9).tolist(), *np.linspace(-1, 3, 22)[1:].tolist()]


@pytest.mark.parametrize("seed", range(5))
def test_nothing_stops_within_a_warm_up_that_reached_nothing(seed: int) -> None:
    """The eval falls while the learning rate rises, and recovers."""
    scores = vary(LONG_DIP, seed)
    without = [item for item in list_warm_up(scores, 90, 30) if item.role is MetricRole.EVAL]
    assert replay(POLICIES["early"], without[:8]).verdict.verdict is Call.STOP
    held = replay(POLICIES["early"], list_warm_up(scores[:8], 90, 30)).verdict
    assert held.verdict is Call.SUSPECT
    assert "no stop: the learning rate still rises" in held.reason
    assert not replay(POLICIES["early"], list_warm_up(scores, 190, 30)).verdict.stops


def test_fall_after_the_warm_up_or_after_a_gain_is_judged() -> None:
    """Nothing is held back once the learning rate has peaked, or where an eval was better than the first two."""
    assert replay(POLICIES["early"], list_warm_up(vary(LONG_DIP, 2), 90, 30)).verdict.step == 100
    gained = [0.0, 0.1, 1.0, 0.8, 0.5, 0.3, 0.1, -0.1, -0.3, -0.5, -0.7, -0.9]
    stop = judge("early", gained, 30).step
    assert stop is not None
    assert replay(POLICIES["early"], list_warm_up(gained, 500, 30)).verdict.step == 10 * stop


def test_counting_rules_judge_the_first_evals() -> None:
    """Three declines from the first eval on stop a run under a policy that asks for three declines."""
    assert judge("paper", [0.9, 0.8, 0.7, 0.6], None).step == 4


def test_counting_rules_must_suffice_for_an_early_stop() -> None:
    """Their calls count alone while the score has fallen from the first eval on."""
    decline, posterior = KDecline(k=3), POLICIES["early"].members[0]
    policy = Policy("both", (Member(decline, decline.thresholds), posterior), at_least=2)
    assert judge(policy, [0.9, 0.8, 0.7, 0.6, 0.5], 6).verdict is Call.SUSPECT
    assert judge(policy, [0.9, 0.8, 0.7, 0.6, 0.5, 0.4], 6).step == 6


@pytest.mark.parametrize("policy", ["default", "early", "cautious"])
@pytest.mark.parametrize("seed", range(10))
def test_level_below_a_lucky_second_eval_is_no_turn(policy: str, seed: int) -> None:
    """A reward that jumps at the second eval and then varies around a lower level, far above its start."""
    assert judge(policy, vary(LUCKY_SECOND, seed) if seed else LUCKY_SECOND, None).verdict is not Call.STOP


def test_wait_for_a_lucky_second_eval_ends() -> None:
    """A run that loses half of its first rise is stopped at once, and any at the 16th eval."""
    falling = [0.0, 1.0, 0.98, 0.95, 0.9, 0.8, 0.7, 0.6, 0.45, 0.3, 0.2, 0.1]
    assert judge("early", falling, 14).step == 10
    slowly = [0.0, 1.0, 0.99, 0.98, 0.97, *np.linspace(0.95, 0.6, 15).tolist()]
    held = judge("early", slowly[:15], 24)
    assert held.verdict is Call.SUSPECT
    assert "no stop: the second eval is the best, and most of its rise is left" in held.reason
    assert judge("early", slowly, 24).step == 16


@pytest.mark.parametrize("seed", range(10))
def test_short_overfit_is_stopped_before_its_end(seed: int) -> None:
    """A loss that rises from its third eval of eight on; its best checkpoint is the third."""
    scores = vary(negate(SHORT_OVERFIT), seed) if seed else negate(SHORT_OVERFIT)
    assert judge("default", scores[:7], 8).step in (6, 7)
    assert choose_step(scores) == 3


@pytest.mark.parametrize("policy", ["default", "early"])
@pytest.mark.parametrize("planned", [29, 60, 300, 3000])
def test_overfit_is_stopped_no_later_with_a_plan(policy: str, planned: int) -> None:
    """A plan that nobody means does not delay the stop of a loss that has risen for twelve evals."""
    without, with_plan = (judge(policy, negate(OVERFIT), length).step for length in (None, planned))
    assert without == (22 if policy == "default" else 20)
    assert with_plan is not None
    assert with_plan <= without


@pytest.mark.parametrize("at", [0, 1, 2])
def test_level_below_one_lucky_early_eval_is_no_turn(at: int) -> None:
    """A score that jumps at its second eval and stays, but for one far better eval among the first three: of 20 runs of
    unknown length at most two are stopped."""
    stops = 0
    for seed in range(20):
        scores = np.random.default_rng([at, seed]).standard_normal(30)
        scores[0] -= 30 if at else 0
        scores[at] += 15
        stops += judge("default", scores.tolist(), None).stops
    assert stops <= 2


@pytest.mark.parametrize("evals", [20, 30])
def test_long_dip_at_the_start_is_no_turn(evals: int) -> None:
    """The eval falls by 1 in six evals, then rises to +3 by the planned end."""
    rng = np.random.default_rng(evals)
    curve = np.concatenate([np.linspace(0, -1, 7), np.linspace(-1, 3, evals - 6)[1:]])
    runs = [curve + 0.05 * rng.standard_normal(evals) for _ in range(20)]
    assert sum(judge("default", run[:-1].tolist(), evals).stops for run in runs) <= 1


@pytest.mark.parametrize(("planned", "words"), [(None, "not known"), (30, "known"), (28, "reached")])
def test_note_names_the_plan(planned: int | None, words: str) -> None:
    """At the last eval of a plan, and after it, the note does not call the length unknown."""
    policy = Policy("posterior", (Member(POLICIES["default"].members[0].detector, Thresholds(0.1, None)),))
    note = judge(policy, negate(OVERFIT)[:28], planned).evidence[0].note
    assert note.endswith(f"length of the run {words}")
