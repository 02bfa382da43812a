"""The choice of the best checkpoint: what every rule promises, and what the raw maximum adds."""

from __future__ import annotations

import math

import pytest
from evalstop_detectors import Best, Chooser, RawMaximum, Score
from hypothesis import given
from hypothesis import strategies as st

from tests.detectors.strategies import round_values, values

CHOOSERS: list[Chooser] = [RawMaximum()]
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
