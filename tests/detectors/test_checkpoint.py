"""The choice of the best checkpoint: what every rule promises, and what the raw maximum adds."""

from __future__ import annotations

import math
import random
import sys

import pytest
from evalstop_detectors.checkpoint import Best, Chooser, RawMaximum, Score, SmoothedMaximum
from hypothesis import given
from hypothesis import strategies as st

from tests.detectors.strategies import round_values, values

CHOOSERS: list[Chooser] = [RawMaximum(), SmoothedMaximum()]
every_chooser = pytest.mark.parametrize("chooser", CHOOSERS, ids=lambda chooser: chooser.name)

steps = st.integers(0, 12)
existing_steps = st.sets(steps)


def scores_of(drawn: st.SearchStrategy[float]) -> st.SearchStrategy[list[Score]]:
    """Scores by ascending step, each step once."""
    return st.dictionaries(steps, drawn, max_size=12).map(
        lambda found: [Score(step, found[step]) for step in sorted(found)]
    )


@every_chooser
@given(scores=scores_of(values), existing=existing_steps)
def test_the_choice_exists(chooser: Chooser, scores: list[Score], existing: set[int]) -> None:
    """The choice is a checkpoint that exists, with the finite score measured there; None only when there is none."""
    best = chooser.choose(scores, existing)
    candidates = {score.step: score.value for score in scores if score.step in existing and math.isfinite(score.value)}
    assert (best is None) == (not candidates)
    if best is not None:
        assert candidates[best.step] == best.score
        assert best.score <= max(candidates.values())
        assert best.chosen_by == chooser.name


@every_chooser
@given(scores=scores_of(round_values), existing=existing_steps, exponent=st.integers(-20, 20), shift=st.integers(-9, 9))
def test_the_choice_knows_no_unit(
    chooser: Chooser, scores: list[Score], existing: set[int], exponent: int, shift: int
) -> None:
    """Scores in another unit, or counted from another zero, choose the same step."""
    best = chooser.choose(scores, existing)
    changed = chooser.choose([Score(item.step, math.ldexp(item.value + shift, exponent)) for item in scores], existing)
    assert (best and best.step) == (changed and changed.step)


@every_chooser
@given(scores=scores_of(values), existing=existing_steps)
def test_any_collection_of_steps_will_do(chooser: Chooser, scores: list[Score], existing: set[int]) -> None:
    """A list, with or without repeats, names the existing checkpoints as well as a set does."""
    assert chooser.choose(scores, [*existing, *existing]) == chooser.choose(scores, existing)


@given(scores=scores_of(values), existing=existing_steps, chance=st.randoms(use_true_random=False))
def test_the_raw_maximum_knows_no_order(scores: list[Score], existing: set[int], chance: object) -> None:
    """In whatever order the scores stand, the raw maximum is the same checkpoint."""
    shuffled = list(scores)
    chance.shuffle(shuffled)  # type: ignore[attr-defined]
    assert RawMaximum().choose(shuffled, existing) == RawMaximum().choose(scores, existing)


@given(scores=scores_of(values), existing=existing_steps)
def test_scores_without_a_checkpoint_do_not_matter(scores: list[Score], existing: set[int]) -> None:
    """The raw maximum is chosen as if the evals without a checkpoint had never been."""
    kept = [score for score in scores if score.step in existing]
    assert RawMaximum().choose(scores, existing) == RawMaximum().choose(kept, set(range(13)))


@given(scores=scores_of(round_values), existing=existing_steps)
def test_of_equal_scores_the_earliest_is_kept(scores: list[Score], existing: set[int]) -> None:
    """The raw maximum is the highest score, and of several the first."""
    candidates = [score for score in scores if score.step in existing]
    highest = [score for score in candidates if all(score.value >= other.value for other in candidates)]
    expected = Best(highest[0].step, highest[0].value, "raw_maximum") if highest else None
    assert RawMaximum().choose(scores, existing) == expected


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_no_number_is_never_best(bad: float) -> None:
    """NaN and infinities neither win nor hide the best of the others."""
    scores = [Score(1, 0.5), Score(2, bad), Score(3, 0.7), Score(4, 0.6)]
    assert RawMaximum().choose(scores, {1, 2, 3, 4}) == Best(3, 0.7, "raw_maximum")
    assert RawMaximum().choose(scores, {2}) is None


def noisy(clean: list[float], sd: float, seed: int, stderr: float | None = None) -> list[Score]:
    chance = random.Random(seed)
    return [Score(step, value + chance.gauss(0, sd), stderr) for step, value in enumerate(clean)]


@given(scores=scores_of(values), existing=existing_steps, stderr=st.sampled_from([None, 0.0, 1.0, math.nan, 1e308]))
def test_the_smoothed_score_is_a_number(scores: list[Score], existing: set[int], stderr: float | None) -> None:
    """Whatever arrives, the smoothed score lies within the finite scores and its standard error is finite."""
    best = SmoothedMaximum().choose([Score(item.step, item.value, stderr) for item in scores], existing)
    if best is not None:
        finite = [item.value for item in scores if math.isfinite(item.value)]
        assert best.smoothed is not None
        assert best.smoothed_stderr is not None
        assert min(finite) <= best.smoothed <= max(finite)
        assert 0 <= best.smoothed_stderr <= sys.float_info.max


@given(length=st.integers(1, 60), peak=st.integers(0, 59), existing=st.sets(st.integers(0, 59)))
def test_scores_without_noise_are_left_as_they_are(length: int, peak: int, existing: set[int]) -> None:
    """Of straight lines up to a peak and down from it, the smoothed maximum is the raw one, with its raw score."""
    scores = [Score(step, float(-abs(step - peak))) for step in range(length)]
    raw, smoothed = (chooser.choose(scores, existing) for chooser in (RawMaximum(), SmoothedMaximum()))
    assert (raw and raw.step) == (smoothed and smoothed.step)


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -7.25, 1e300, 5e-324])
def test_a_constant_run_keeps_the_earliest(value: float) -> None:
    """Of equal scores the earliest is kept, and its smoothed score is what all of them are."""
    best = SmoothedMaximum().choose([Score(step, value) for step in range(40)], range(3, 40))
    assert best == Best(3, value, "smoothed_maximum", value, 0.0)


def test_one_lucky_score_is_not_the_best() -> None:
    """A single score far above its neighbors wins by the raw maximum and not when smoothed."""
    hill = [1 - ((step - 60) / 60) ** 2 for step in range(100)]
    scores = noisy(hill, 0.05, 1)
    scores[10] = Score(10, 3.0)
    raw, smoothed = (chooser.choose(scores, range(100)) for chooser in (RawMaximum(), SmoothedMaximum()))
    assert raw is not None
    assert raw.step == 10
    assert smoothed is not None
    assert abs(smoothed.step - 60) < 15


def test_smoothing_loses_less_of_the_gain_than_the_raw_maximum() -> None:
    """Over 60 hills with noise of a fifth of the gain, the kept checkpoint is worth more when chosen by smoothing."""
    hill = [1 - ((step - 60) / 60) ** 2 for step in range(100)]
    lost: dict[str, float] = {}
    for seed in range(60):
        scores = noisy(hill, 0.2, seed)
        for chooser in CHOOSERS:
            best = chooser.choose(scores, range(100))
            assert best is not None
            lost[chooser.name] = lost.get(chooser.name, 0) + 1 - hill[best.step]
    assert lost["smoothed_maximum"] < 0.5 * lost["raw_maximum"]


def test_the_standard_error_is_that_of_the_smoothed_score() -> None:
    """Over 400 flat runs the smoothed score of a fixed checkpoint errs as much as its standard error says."""
    errors = []
    for seed in range(400):
        best = SmoothedMaximum().choose(noisy([0.0] * 64, 1.0, seed, stderr=1.0), {30})
        assert best is not None
        assert best.smoothed is not None
        assert best.smoothed_stderr
        errors.append((best.smoothed / best.smoothed_stderr) ** 2)
    assert 0.75 < sum(errors) / len(errors) < 1.35


def test_scores_without_a_checkpoint_are_neighbors() -> None:
    """Of two checkpoints with equal scores, the one among high scores is believed better."""
    ripple = [0.0, 0.1, -0.1] * 7
    scores = [Score(step, (1.0 if step > 10 else 0.0) + ripple[step]) for step in range(21)]
    scores[3], scores[17] = Score(3, 0.7), Score(17, 0.7)
    best = SmoothedMaximum().choose(scores, {3, 17})
    assert best is not None
    assert best.step == 17


def test_told_standard_errors_widen_the_window() -> None:
    """Where differences show no noise, a trainer's word that there is some is taken."""
    scores = [Score(step, float(step == 20), stderr=1.0) for step in range(41)]
    best = SmoothedMaximum().choose(scores, range(41))
    assert best is not None
    assert best.smoothed is not None
    assert best.smoothed < 0.5
    assert best.smoothed_stderr is not None
    assert best.smoothed_stderr > 0.1
