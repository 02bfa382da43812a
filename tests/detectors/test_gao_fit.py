"""The fit of the eval score over distance: it finds and foretells the peak of its own forms, and is silent on
others."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import pytest
from evalstop_detectors import Evidence, MetricRole, Observation
from evalstop_detectors.detectors.gao_fit import GaoFit, GaoFitState, _below_zero, _inverted
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from tests.detectors.strategies import series

Form = Callable[[float], float]


def rl(d: float) -> float:
    """Peak at 3."""
    return d * (1 + math.log(3) - math.log(d)) if d > 0 else 0.0


def bon(d: float) -> float:
    """Peak at 3."""
    return d * (1 - d / 6)


def run(
    form: Form, distances: Sequence[float], sd: float, seed: int = 0, stderr: float | None = None
) -> list[Evidence]:
    """The evidence after each eval; steps are tens."""
    chance, detector = random.Random(seed), GaoFit()
    state, found = detector.start(), []
    for index, d in enumerate(distances):
        state, _ = detector.step(state, Observation(MetricRole.KL, 10 * index, d * d))
        eval_scores = Observation(MetricRole.EVAL, 10 * index, form(d) + chance.gauss(0, sd), stderr)
        state, evidence = detector.step(state, eval_scores)
        found.append(evidence)
    return found


def upto(last: float, n: int = 60) -> list[float]:
    return [last * index / (n - 1) for index in range(n)]


def told_peak(evidence: Evidence) -> tuple[float, float]:
    match = re.search(r"peak at sqrt\(KL\) = (\S+) ± ([^\s,;]+)", evidence.note)
    assert match is not None
    return float(match[1]), float(match[2])


@pytest.mark.parametrize(("form", "words"), [(rl, "reinforcement learning"), (bon, "best-of-n")])
@pytest.mark.parametrize("stderr", [None, 0.02])
def test_it_finds_the_peak_of_its_forms(form: Form, words: str, stderr: float | None) -> None:
    """Past the peak of either form it names the form, places the peak and the turn there, and is sure."""
    last = run(form, upto(6), 0.02, stderr=stderr)[-1]
    peak, error = told_peak(last)
    assert words in last.note
    assert abs(peak - 3) < max(3 * error, 0.1)
    assert last.value > 0.999
    assert last.turn_step is not None
    assert abs(last.turn_step - 295) <= 30


@pytest.mark.parametrize("form", [rl, bon])
def test_before_the_peak_it_foretells_it(form: Form) -> None:
    """While the eval score rises the slope is not negative, and the note says near which step the peak is to be
    expected."""
    last = run(form, upto(2.4), 0.002)[-1]
    assert last.value < 0.01
    assert last.turn_step is None
    match = re.search(r"expected near step (\d+)", last.note)
    assert match is not None
    assert abs(int(match[1]) - 10 * 59 * 3 / 2.4) < 150


def test_the_interval_holds_the_peak() -> None:
    """Over 60 runs the peak of the form lies in the told interval nine times in ten and more."""
    held = 0
    for seed in range(60):
        peak, error = told_peak(run(rl, upto(6), 0.1, seed)[-1])
        held += abs(peak - 3) <= error
    assert held >= 54


def test_the_eval_score_that_falls_while_kl_stands_still_is_not_judged() -> None:
    """Where the eval score goes on falling at one distance, the forms do not apply, and the note says so."""
    distances = [*upto(4, 40), *(4 + 0.001 * index for index in range(40))]
    chance = random.Random(0)
    eval_scores = [rl(d) - 0.2 * max(index - 40, 0) + chance.gauss(0, 0.05) for index, d in enumerate(distances)]
    found = iter(eval_scores)
    evidence = run(lambda _: next(found), distances, 0.0)
    assert evidence[-1].value == 0
    assert "do not fit" in evidence[-1].note


def test_a_form_that_does_not_fit_is_not_judged() -> None:
    """The eval score that swings over distance is fitted by neither form: it abstains."""
    evidence = run(lambda d: math.sin(4 * d), upto(6, 100), 0.01)
    assert {item.value for item in evidence[60:]} == {0.0}
    assert "not used" in evidence[-1].note


@pytest.mark.parametrize("kl", [[0.0], [-0.1, -3.0], [5.0], [1e300, 1e-300], []])
def test_a_useless_kl_is_told(kl: list[float]) -> None:
    """Zero, negative, constant, absurd and missing KL give no evidence, a note, and no exception."""
    detector, chance = GaoFit(), random.Random(0)
    state, evidence = detector.start(), None
    for index in range(40):
        if kl:
            state, _ = detector.step(state, Observation(MetricRole.KL, index, kl[index % len(kl)]))
        state, evidence = detector.step(state, Observation(MetricRole.EVAL, index, chance.gauss(0, 1)))
    assert evidence is not None
    assert evidence.value == 0
    assert evidence.note


def test_a_kl_of_an_earlier_step_will_do() -> None:
    """Where KL is logged at other steps than evals, the latest before the eval is taken."""
    detector, found = GaoFit(), []
    for lag in (0, 3):
        state, value = detector.start(), 0.0
        for index, d in enumerate(upto(6)):
            state, _ = detector.step(state, Observation(MetricRole.KL, 10 * index, d * d))
            state, evidence = detector.step(state, Observation(MetricRole.EVAL, 10 * index + lag, rl(d)))
            value = evidence.value
        found.append(value)
    assert found[0] == found[1] > 0.99


def test_an_outlier_does_not_pass_for_a_turn() -> None:
    """One eval score far below the others neither alarms nor silences for long."""
    eval_scores = [rl(d) for d in upto(2.5, 80)]
    eval_scores[60] -= 5
    found = iter(eval_scores)
    assert max(item.value for item in run(lambda _: next(found), upto(2.5, 80), 0.0)) < 0.9


def test_the_state_stays_small() -> None:
    """After thousands of evals the state is as large as after a few hundred."""
    detector, state, sizes = GaoFit(), GaoFit().start(), []
    for index in range(3000):
        state, _ = detector.step(state, Observation(MetricRole.KL, index, index / 100))
        state, _ = detector.step(state, Observation(MetricRole.EVAL, index, math.sin(index)))
        sizes.append(len(msgspec.json.encode(state)))
    assert max(sizes) < 1.3 * sizes[300]
    assert msgspec.json.decode(msgspec.json.encode(state), type=GaoFitState) == state


@given(observations=series({MetricRole.KL, MetricRole.EVAL}, max_size=30), least=st.integers(5, 6))
def test_it_is_a_probability(observations: list[Observation], least: int) -> None:
    """Whatever arrives, the evidence lies between 0 and 1, and a turn is told only of more than one half."""
    detector = GaoFit(least_evals=least)
    state = detector.start()
    for observation in observations:
        state, evidence = detector.step(state, observation)
        assert 0 <= evidence.value <= 1
        assert evidence.turn_step is None or evidence.value > 0.5


def test_it_never_stops_a_run_by_itself() -> None:
    """The forms fit a peak to plateaus: by itself the fit is grounds to suspect at most."""
    assert GaoFit().thresholds.stop_at is None


@given(rows=st.lists(st.lists(st.integers(-9, 9).map(float), min_size=3, max_size=3), min_size=4, max_size=9))
def test_the_inverse_is_one(rows: list[list[float]]) -> None:
    """The inverse of a sum of products is what numpy's is, or told to be close to singular."""
    gram = np.array(rows).T @ np.array(rows)
    found = _inverted(gram.tolist())
    if found is not None:
        assert np.allclose(np.array(found) @ gram, np.eye(3), atol=1e-4)


@given(t=st.floats(-8, 8), dof=st.integers(2, 200))
def test_the_posterior_is_that_of_t(t: float, dof: int) -> None:
    """The probability to lie below zero agrees with the t distribution to two digits."""
    assert _below_zero(t, 1.0, dof) == pytest.approx(float(stats.t.cdf(-t, dof)), abs=0.02)


def test_a_plateau_does_not_pass_for_a_peak() -> None:
    """Of 20 plateaus, which a gentle peak fits, few would be suspected; by the slope alone most would."""
    reached = {0.0: 0, 0.1: 0}
    for least_fall in reached:
        for seed in range(20):
            chance, detector = random.Random(seed), GaoFit(least_fall=least_fall)
            state, highest = detector.start(), 0.0
            for index, d in enumerate(upto(4, 80)):
                state, _ = detector.step(state, Observation(MetricRole.KL, index, d * d))
                eval_scores = min(d / 2, 1.0) + chance.gauss(0, 0.1)
                state, evidence = detector.step(state, Observation(MetricRole.EVAL, index, eval_scores))
                highest = max(highest, evidence.value)
            reached[least_fall] += highest >= 0.99
    assert reached[0.1] <= 6 < reached[0.0]
