"""The choice of the best checkpoint: what every rule promises, and what the raw maximum adds."""

from __future__ import annotations

import math
import random
import statistics
import sys

import pytest
from evalstop_detectors.checkpoint.choice import BestCheckpoint, BestSoFar, Chooser, RawMaximum, Score, SmoothedMaximum
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


@every_chooser
@given(
    scores=scores_of(values),
    existing=existing_steps,
    stderr=st.sampled_from([None, 0.0, 1.0, math.nan]),
    order=st.randoms(use_true_random=False),
)
def test_following_a_run_gives_what_choosing_gives(
    chooser: Chooser, scores: list[Score], existing: set[int], stderr: float | None, order: random.Random
) -> None:
    """After every score and every checkpoint, in whatever order the two come, the best so far is the chosen one."""
    follows(chooser, [Score(item.step, item.value, stderr) for item in scores], existing, order, asked=1.0)


@every_chooser
@pytest.mark.parametrize("seed", range(12))
def test_following_a_long_run_gives_what_choosing_gives(chooser: Chooser, seed: int) -> None:
    """The same over runs that rise, jump, repeat themselves, lie far off and grow in range, asked now and then."""
    order = random.Random(seed)
    length, sd = order.choice([40, 300, 1100]), order.choice([0.0, 0.01, 0.3])
    level, clean = 0.0, []
    for index in range(length):
        level += order.choice([0.0, 0.01, -0.005]) + (order.gauss(0, 5) if order.random() < 0.01 else 0.0)
        clean.append(round(level, 1) if seed % 3 == 0 else level * (1000 if seed % 4 == 0 and index > 200 else 1))
    clean = [value + (order.choice([-9, 9]) if order.random() < 0.05 else 0) for value in clean]
    existing = {index for index in range(length) if order.random() < (0.02 if seed % 2 else 0.7)}
    follows(chooser, noisy(clean, sd, seed, stderr=0.1 if seed % 5 == 0 else None), existing, order, asked=0.1)


def follows(chooser: Chooser, scores: list[Score], existing: set[int], order: random.Random, asked: float) -> None:
    news: list[Score | int] = list(scores)
    for step in sorted(existing):
        news.insert(order.randint(0, len(news)), step)
    sofar, seen, saved = BestSoFar(chooser), list[Score](), set[int]()
    for item in news:
        if isinstance(item, Score):
            sofar.add(item)
            seen.append(item)
        else:
            sofar.saved(item)
            saved.add(item)
        if order.random() < asked:
            assert sofar.best() == chooser.choose(seen, saved)
            assert sofar.raw() == RawMaximum().choose(seen, {score.step for score in seen})
    assert sofar.best() == chooser.choose(seen, saved)


def by_definition(scores: list[Score], caution: float = 0.5) -> list[float]:
    """The lower bound of every score that counts, slow and obvious."""
    everything = [score.value for score in scores]
    block = max(k for k in [0, *range(20)] if 4**k <= max(1, len(scores) // 64))
    count = len(scores) // 2**block * 2**block
    ranges = [0, *(max(abs(value / 2 - everything[0] / 2) for value in everything[:n]) for n in range(1, count + 1))]
    grew = [n for n in range(1, count + 1) if ranges[n] > 0 and power(ranges[n]) != power(ranges[n - 1])]
    fitted_on = max([n for n in range(1, count + 1) if int(bin(n)[5:] or "0", 2) == 0] + grew)
    known, everything = everything[:fitted_on], everything[:count]
    reach = math.inf
    if len(known) >= 5:
        off = [abs(value - median) for value, median in zip(known, of_five(known), strict=True)]
        reach = 3 * max(1.2 / 0.6745 * statistics.median(off), roughness(known)) or math.inf
    sd = roughness(drawn(known, reach))
    if sd <= 1e-9 * (max(known) - min(known)):
        return everything
    halves = sorted({round(width * math.sqrt(fitted_on)) for width in (0, 0.175, 0.35, 0.5, 0.7, 1)})
    risks = []
    for half in halves:
        tame = drawn(known, reach)
        off = [a - b for a, b in zip(tame, centered(centered(tame, half), half), strict=True)]
        own = sum(1 / (min(i + half + 1, fitted_on) - max(i - half, 0)) for i in range(fitted_on))
        risks.append(sum(x * x for x in off) / sd**2 + 2 * own)
    raw = [math.exp((min(risks) - risk) / 16) for risk in risks]
    tame, bounds = drawn(everything, reach), [0.0] * count
    for half, weight in zip(halves, raw, strict=True):
        for i, mean in enumerate(centered(centered(tame, half), half)):
            w = min(i + half + 1, count) - max(i - half, 0)
            bounds[i] += weight / sum(raw) * (mean - caution * sd * math.sqrt((2 * w * w + 1) / (3 * w**3)))
    return bounds


def power(value: float) -> int | None:
    return math.frexp(value)[1] if value else None


def of_five(values: list[float]) -> list[float]:
    padded = [values[0]] * 2 + values + [values[-1]] * 2
    return [statistics.median(padded[i : i + 5]) for i in range(len(values))]


def drawn(values: list[float], reach: float) -> list[float]:
    if reach == math.inf:
        return values
    return [min(max(v, m - reach), m + reach) for v, m in zip(values, of_five(values), strict=True)]


def roughness(values: list[float]) -> float:
    bends = [abs(values[i] - 2 * values[i + 1] + values[i + 2]) for i in range(len(values) - 2)]
    return statistics.median(bends) / (0.6745 * math.sqrt(6)) if bends else 0.0


def centered(values: list[float], half: int) -> list[float]:
    return [statistics.fmean(values[max(i - half, 0) : i + half + 1]) for i in range(len(values))]


@given(
    length=st.sampled_from([1, 2, 3, 4, 5, 6, 7, 9, 13, 19, 23, 40, 150, 255, 257, 300, 515, 700]),
    sd=st.sampled_from([0.0, 0.05, 0.5]),
    jump=st.sampled_from([0.0, 0.0, 10.0]),
    seed=st.integers(0, 10**6),
)
def test_the_choice_is_that_of_its_definition(length: int, sd: float, jump: float, seed: int) -> None:
    """No other step that counts has a higher bound by the words of the rule, to rounding."""
    clean = [min(index / 30, 1.0) + (jump if index > length - 9 else 0.0) for index in range(length)]
    scores = noisy(clean, sd, seed)
    existing = set(random.Random(seed).sample(range(length), (length + 1) // 2))
    best = SmoothedMaximum().choose(scores, existing)
    assert best is not None
    bounds = by_definition(scores)
    highest = max((bounds[index] for index in existing if index < len(bounds)), default=None)
    if highest is None:
        assert best.smoothed is None
    else:
        assert bounds[best.step] >= highest - 1e-9 * (1 + jump)


def test_while_no_checkpoint_counts_the_newest_are_taken_as_measured() -> None:
    """A checkpoint beside a score that still waits is better than none, and is chosen without smoothing until then."""
    sofar = BestSoFar(SmoothedMaximum())
    sofar.saved(1025)
    for score in noisy([0.0] * 1025, 0.1, 1):
        sofar.add(score)
    assert sofar.best() is None
    for step in (1025, 1026, 1027):
        sofar.add(Score(step, 0.0))
        best = sofar.best()
        assert best is not None
        assert best.step == 1025
        assert (best.smoothed is None) == (step < 1027)


@every_chooser
def test_a_late_score_is_refused(chooser: Chooser) -> None:
    """A score at or before the last one, finite or not, is no longer the same run."""
    sofar = BestSoFar(chooser)
    sofar.add(Score(5, math.nan))
    for step in (5, 4):
        with pytest.raises(ValueError, match=f"step {step} is late; the last score was at step 5"):
            sofar.add(Score(step, 1.0))


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
    expected = BestCheckpoint(highest[0].step, highest[0].value, "raw_maximum") if highest else None
    assert RawMaximum().choose(scores, existing) == expected


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_no_number_is_never_best(bad: float) -> None:
    """NaN and infinities neither win nor hide the best of the others."""
    scores = [Score(1, 0.5), Score(2, bad), Score(3, 0.7), Score(4, 0.6)]
    assert RawMaximum().choose(scores, {1, 2, 3, 4}) == BestCheckpoint(3, 0.7, "raw_maximum")
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
    assert best == BestCheckpoint(3, value, "smoothed_maximum", value, 0.0)


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
