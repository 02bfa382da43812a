"""gao_fit: it finds and predicts the peak of Gao's forms, and abstains on other curves."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Sequence

import pytest
from evalstop_detectors import Evidence, MetricRole, Observation
from evalstop_detectors.detectors.gao_fit import Fit, GaoFit, _below_zero
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from tests.detectors.strategies import collect_evidence, eval_series

Curve = Callable[[float], float]


def rl_curve(d: float) -> float:
    """Gao's curve with its peak at a distance of 3."""
    return d * (1 + math.log(3) - math.log(d)) if d > 0 else 0.0


def best_of_n_curve(d: float) -> float:
    """Gao's curve with its peak at a distance of 3."""
    return d * (1 - d / 6)


def collect_at_evals(
    scores: Sequence[float],
    kls: Sequence[float],
    detector: GaoFit | None = None,
    stderr: float | None = None,
    lag: int = 0,
) -> list[Evidence]:
    """The evidence after each eval; the KL at index i has step 10 * i, and the eval is `lag` steps later."""
    observations = [
        item
        for index, (score, kl) in enumerate(zip(scores, kls, strict=True))
        for item in (
            Observation(MetricRole.KL, 10 * index, kl),
            Observation(MetricRole.EVAL, 10 * index + lag, score, stderr),
        )
    ]
    return collect_evidence(detector or GaoFit(), observations)[1::2]


def run_detector(
    curve: Curve, distances: Sequence[float], sd: float, seed: int = 0, stderr: float | None = None
) -> list[Evidence]:
    """The evidence after each eval of a noisy curve."""
    rng = random.Random(seed)
    return collect_at_evals([curve(d) + rng.gauss(0, sd) for d in distances], [d * d for d in distances], stderr=stderr)


def spread_distances(last: float, n: int = 60) -> list[float]:
    """`n` equally spaced distances from 0 to `last`."""
    return [last * index / (n - 1) for index in range(n)]


def read_peak(evidence: Evidence) -> tuple[float, float]:
    """The peak and its error, read from the note."""
    match = re.search(r"peak at sqrt\(KL\) = (\S+) ± ([^\s,;]+)", evidence.note)
    assert match is not None
    return float(match[1]), float(match[2])


@pytest.mark.parametrize(("curve", "words"), [(rl_curve, "reinforcement learning"), (best_of_n_curve, "best-of-n")])
@pytest.mark.parametrize("stderr", [None, 0.02])
def test_peak_is_found(curve: Curve, words: str, stderr: float | None) -> None:
    """After the peak of either curve the note names the curve and the peak, and the probability is near 1."""
    last = run_detector(curve, spread_distances(6), 0.02, stderr=stderr)[-1]
    peak, error = read_peak(last)
    assert words in last.note
    assert abs(peak - 3) < max(3 * error, 0.1)
    assert last.value > 0.999
    assert last.turn_step is not None
    assert abs(last.turn_step - 295) <= 30


@pytest.mark.parametrize("curve", [rl_curve, best_of_n_curve])
def test_peak_is_predicted(curve: Curve) -> None:
    """Before the peak the probability is below 0.01, and the note says near which step the peak is expected."""
    last = run_detector(curve, spread_distances(2.4), 0.002)[-1]
    assert last.value < 0.01
    assert last.turn_step is None
    match = re.search(r"expected near step (\d+)", last.note)
    assert match is not None
    assert abs(int(match[1]) - 10 * 59 * 3 / 2.4) < 150


def test_interval_covers_the_peak() -> None:
    """In at least 54 of 60 runs the peak is within the interval of the note."""
    covered = 0
    for seed in range(60):
        peak, error = read_peak(run_detector(rl_curve, spread_distances(6), 0.1, seed)[-1])
        covered += abs(peak - 3) <= error
    assert covered >= 54


def test_fall_at_constant_kl_gives_no_evidence() -> None:
    """If the eval keeps falling while KL is constant, the value is 0 and the note says that the fit fails."""
    distances = [*spread_distances(4, 40), *(4 + 0.001 * index for index in range(40))]
    rng = random.Random(0)
    eval_scores = [rl_curve(d) - 0.2 * max(index - 40, 0) + rng.gauss(0, 0.05) for index, d in enumerate(distances)]
    evidence = collect_at_evals(eval_scores, [d * d for d in distances])
    assert evidence[-1].value == 0
    assert "do not fit" in evidence[-1].note


def test_kl_stands_still_is_said_only_when_it_does() -> None:
    """Of a KL that stopped the note says that it stands still, not of one that rises as ever in a long run."""
    notes = []
    for stops_at in (380, 400):
        distances = [min(step, stops_at) ** 0.5 for step in range(400)]
        scores = [d + 0.2 * max(step - 380, 0) + 0.02 * (step % 3) for step, d in enumerate(distances)]
        notes.append(collect_at_evals(scores, [d**2 for d in distances], stderr=0.02)[-1].note)
    assert ["stands still" in note for note in notes] == [True, False], notes


def test_other_curves_give_no_evidence() -> None:
    """If neither curve fits, the value is 0 and the note says that the fit is not used."""
    evidence = run_detector(lambda d: math.sin(4 * d), spread_distances(6, 100), 0.01)
    assert {item.value for item in evidence[60:]} == {0.0}
    assert "not used" in evidence[-1].note


@pytest.mark.parametrize("kl", [[0.0], [-0.1, -3.0], [5.0], [1e300, 1e-300], []])
def test_unusable_kl_gives_a_note(kl: list[float]) -> None:
    """Zero, negative, constant, extreme and missing KL give a value of 0 and a note."""
    rng = random.Random(0)
    evals = eval_series([rng.gauss(0, 1) for _ in range(40)])
    kls = [Observation(MetricRole.KL, index, kl[index % len(kl)]) for index in range(40) if kl]
    last = collect_evidence(GaoFit(), sorted([*evals, *kls], key=lambda item: item.order))[-1]
    assert last.value == 0
    assert last.note


def test_latest_earlier_kl_is_used() -> None:
    """If KL is logged at other steps than the evals, the latest KL before an eval is used."""
    scores, kls = [rl_curve(d) for d in spread_distances(6)], [d * d for d in spread_distances(6)]
    at_once, later = (collect_at_evals(scores, kls, lag=lag)[-1].value for lag in (0, 3))
    assert at_once == later > 0.99


def test_single_outlier_is_no_turn() -> None:
    """One eval far below the others keeps the probability below 0.9."""
    distances = spread_distances(2.5, 80)
    eval_scores = [rl_curve(d) for d in distances]
    eval_scores[60] -= 5
    assert max(item.value for item in collect_at_evals(eval_scores, [d * d for d in distances])) < 0.9


@given(t=st.floats(-8, 8), dof=st.integers(2, 200))
def test_probability_equals_t_distribution(t: float, dof: int) -> None:
    """The probability below zero differs from that of the t distribution by at most 0.02."""
    assert _below_zero(t, 1.0, dof) == pytest.approx(float(stats.t.cdf(-t, dof)), abs=0.02)


@pytest.mark.parametrize(
    ("eval_scale", "kl_scale"), [(1e-161, 1.0), (1e-300, 1.0), (5e-324, 1.0), (1.0, 1e300), (1e300, 1e-300)]
)
def test_numbers_whose_squares_vanish_are_borne(eval_scale: float, kl_scale: float) -> None:
    """Evals or distances so small or large that their squares are zero or infinite give a probability, not an error."""
    rng, distances = random.Random(0), spread_distances(4, 80)
    scores = [eval_scale * (d - d * d / 4 + rng.gauss(0, 0.05)) for d in distances]
    assert all(0 <= item.value <= 1 for item in collect_at_evals(scores, [kl_scale * d * d for d in distances]))


@pytest.mark.parametrize("term", [2, 3])
def test_form_that_hardly_falls_has_no_peak(term: int) -> None:
    """A coefficient whose square is zero gives no peak; over distances of 1e150 it may be so small."""
    covariance = (1.0, 0.0, 0.0, 1.0, 0.0, 1.0)
    assert Fit(term, (0.0, 1e-170, -1e-170), covariance, misfit=1.0).peak(1.0) is None


def test_plateau_is_rarely_suspect() -> None:
    """Of 20 plateaus at most 6 reach 0.99 with `least_fall` at 0.1, more without a least fall."""
    suspect_counts = {0.0: 0, 0.1: 0}
    for least_fall in suspect_counts:
        for seed in range(20):
            rng, distances = random.Random(seed), spread_distances(4, 80)
            scores = [min(d / 2, 1.0) + rng.gauss(0, 0.1) for d in distances]
            evidence = collect_at_evals(scores, [d * d for d in distances], GaoFit(least_fall=least_fall))
            suspect_counts[least_fall] += max(item.value for item in evidence) >= 0.99
    assert suspect_counts[0.1] <= 6 < suspect_counts[0.0]
