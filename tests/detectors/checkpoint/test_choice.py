"""Choice of the best checkpoint among all scores of a run, and its highest raw score."""

from __future__ import annotations

import math
import random
import statistics
import sys
from collections.abc import Iterable

import pytest
from evalstop_detectors.checkpoint.choice import BestCheckpoint, Score, Scores, choose_best, find_highest
from hypothesis import given
from hypothesis import strategies as st

from tests.detectors.strategies import round_values, values

steps = st.integers(0, 12)
existing_steps = st.sets(steps) | st.just(set(range(13)))


def score_lists(drawn: st.SearchStrategy[float]) -> st.SearchStrategy[list[Score]]:
    """Strategy: scores at ascending distinct steps."""
    return st.dictionaries(steps, drawn, max_size=12).map(
        lambda by_step: [Score(step, by_step[step]) for step in sorted(by_step)]
    )


def collect(scores: Iterable[Score], existing: Iterable[int]) -> Scores:
    """Scores, and the steps that have a checkpoint."""
    return Scores().add_scores(scores).add_checkpoints(dict.fromkeys(existing, ""))


def choose(scores: Iterable[Score], existing: Iterable[int]) -> BestCheckpoint | None:
    """The best of the existing checkpoints."""
    return choose_best(collect(scores, existing))


@given(scores=score_lists(values), existing=existing_steps)
def test_choice_is_an_existing_checkpoint(scores: list[Score], existing: set[int]) -> None:
    """The choice exists and has its finite score; it is None only if no checkpoint has a finite score."""
    best = choose(scores, [*existing, *existing])
    candidates = {score.step: score.value for score in scores if score.step in existing and math.isfinite(score.value)}
    assert (best is None) == (not candidates)
    if best is not None:
        assert candidates[best.step] == best.score
        assert best.chosen_by == "smoothed_maximum"


@given(
    scores=score_lists(round_values), existing=existing_steps, exponent=st.integers(-20, 20), shift=st.integers(-9, 9)
)
def test_choice_is_invariant_to_units(scores: list[Score], existing: set[int], exponent: int, shift: int) -> None:
    """Scaled and shifted scores give the same step."""
    best = choose(scores, existing)
    changed = choose([Score(item.step, math.ldexp(item.value + shift, exponent)) for item in scores], existing)
    assert (best and best.step) == (changed and changed.step)


@given(
    scores=score_lists(values),
    existing=existing_steps,
    stderr=st.sampled_from([None, 0.0, 1.0, math.nan]),
    order=st.randoms(use_true_random=False),
)
def test_choice_is_independent_of_order(
    scores: list[Score], existing: set[int], stderr: float | None, order: random.Random
) -> None:
    """Scores and checkpoints may be added in any order, with choices in between."""
    scores = [Score(item.step, item.value, stderr) for item in scores]
    events: list[Score | int] = [*scores, *existing]
    order.shuffle(events)
    check_growing_run(events, order, check_probability=1.0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(2, 12))])
def test_choice_in_a_growing_run_equals_the_choice_from_its_history(seed: int) -> None:
    """What earlier choices leave behind never changes one, with rises, jumps, outliers and a growing range."""
    order = random.Random(seed)
    length, sd = order.choice([40, 300, 1100]), order.choice([0.0, 0.01, 0.3])
    level, clean = 0.0, []
    for index in range(length):
        level += order.choice([0.0, 0.01, -0.005]) + (order.gauss(0, 5) if order.random() < 0.01 else 0.0)
        clean.append(round(level, 1) if seed % 3 == 0 else level * (1000 if seed % 4 == 0 and index > 200 else 1))
    clean = [value + (order.choice([-9, 9]) if order.random() < 0.05 else 0) for value in clean]
    events: list[Score | int] = list(add_noise(clean, sd, seed, stderr=0.1 if seed % 5 == 0 else None))
    for step in range(length):
        if order.random() < (0.02 if seed % 2 else 0.7):
            events.insert(order.randint(0, len(events)), step)
    check_growing_run(events, order, check_probability=0.2)


def check_growing_run(events: list[Score | int], order: random.Random, check_probability: float) -> None:
    """Add scores and checkpoints, and compare with the choice from the whole history, also past a dropped score."""
    grown, seen, saved = Scores(), list[Score](), set[int]()
    for event in events:
        if isinstance(event, Score):
            choose_best(grown.add_scores([Score(event.step, event.value / 2 + 1, event.stderr)]))
            grown = grown.add_scores([event])
            seen = sorted([*seen, event], key=lambda score: score.step)
        else:
            grown = grown.add_checkpoints({event: ""})
            saved.add(event)
        if order.random() < check_probability:
            assert choose_best(grown) == choose(seen, saved)
    assert choose_best(grown) == choose(seen, saved)


def compute_bounds(scores: list[Score], caution: float = 0.5) -> list[float]:
    """A slow reference: the lower bound of every score that is smoothed."""
    all_values = [score.value for score in scores]
    block = max(k for k in [0, *range(20)] if 4**k <= max(1, len(scores) // 64))
    count = len(scores) // 2**block * 2**block
    ranges = [0, *(max(abs(value / 2 - all_values[0] / 2) for value in all_values[:n]) for n in range(1, count + 1))]
    grew = [
        n for n in range(1, count + 1) if ranges[n] > 0 and binary_exponent(ranges[n]) != binary_exponent(ranges[n - 1])
    ]
    fitted_on = max([n for n in range(1, count + 1) if int(bin(n)[5:] or "0", 2) == 0] + grew)
    known, all_values = all_values[:fitted_on], all_values[:count]
    reach = math.inf
    if len(known) >= 5:
        off = [abs(value - median) for value, median in zip(known, median_of_five(known), strict=True)]
        reach = 3 * max(1.2 / 0.6745 * statistics.median(off), estimate_sd(known)) or math.inf
    sd = estimate_sd(clip_outliers(known, reach))
    if sd <= 1e-9 * (max(known) - min(known)):
        return all_values
    halves = sorted({round(width * math.sqrt(fitted_on)) for width in (0, 0.175, 0.35, 0.5, 0.7, 1)})
    risks = []
    for half in halves:
        clipped = clip_outliers(known, reach)
        off = [a - b for a, b in zip(clipped, centered_means(centered_means(clipped, half), half), strict=True)]
        own = sum(1 / (min(i + half + 1, fitted_on) - max(i - half, 0)) for i in range(fitted_on))
        risks.append(sum(x * x for x in off) / sd**2 + 2 * own)
    raw = [math.exp((min(risks) - risk) / 16) for risk in risks]
    clipped, bounds = clip_outliers(all_values, reach), [0.0] * count
    for half, weight in zip(halves, raw, strict=True):
        for i, mean in enumerate(centered_means(centered_means(clipped, half), half)):
            w = min(i + half + 1, count) - max(i - half, 0)
            bounds[i] += weight / sum(raw) * (mean - caution * sd * math.sqrt((2 * w * w + 1) / (3 * w**3)))
    return bounds


def binary_exponent(value: float) -> int | None:
    """The exponent of a float, None for 0."""
    return math.frexp(value)[1] if value else None


def median_of_five(values: list[float]) -> list[float]:
    """The running median over five values, with repeated values at the ends."""
    padded = [values[0]] * 2 + values + [values[-1]] * 2
    return [statistics.median(padded[i : i + 5]) for i in range(len(values))]


def clip_outliers(values: list[float], reach: float) -> list[float]:
    """Values clipped to within `reach` of their running median."""
    if reach == math.inf:
        return values
    return [min(max(v, m - reach), m + reach) for v, m in zip(values, median_of_five(values), strict=True)]


def estimate_sd(values: list[float]) -> float:
    """The noise, estimated from the median of second differences."""
    bends = [abs(values[i] - 2 * values[i + 1] + values[i + 2]) for i in range(len(values) - 2)]
    return statistics.median(bends) / (0.6745 * math.sqrt(6)) if bends else 0.0


def centered_means(values: list[float], half: int) -> list[float]:
    """Means over windows of up to `half` values on each side."""
    return [statistics.fmean(values[max(i - half, 0) : i + half + 1]) for i in range(len(values))]


@given(
    length=st.sampled_from([1, 2, 3, 4, 5, 6, 7, 9, 13, 19, 23, 40, 150, 255, 257, 300, 515, 700]),
    sd=st.sampled_from([0.0, 0.05, 0.5]),
    jump=st.sampled_from([0.0, 0.0, 10.0]),
    seed=st.integers(0, 10**6),
)
def test_choice_has_the_highest_bound(length: int, sd: float, jump: float, seed: int) -> None:
    """No other smoothed checkpoint has a higher lower bound by the slow reference."""
    clean = [min(index / 30, 1.0) + (jump if index > length - 9 else 0.0) for index in range(length)]
    scores = add_noise(clean, sd, seed)
    existing = set(random.Random(seed).sample(range(length), (length + 1) // 2))
    best = choose(scores, existing)
    assert best is not None
    bounds = compute_bounds(scores)
    highest = max((bounds[index] for index in existing if index < len(bounds)), default=None)
    if highest is None:
        assert best.smoothed is None
    else:
        assert bounds[best.step] >= highest - 1e-9 * (1 + jump)


def test_unsmoothed_score_is_used_until_one_is_smoothed() -> None:
    """As long as no checkpoint has a smoothed score, the choice uses the raw scores of the newest."""
    scores = collect(add_noise([0.0] * 1025, 0.1, 1), [1025])
    assert choose_best(scores) is None
    for step in (1025, 1026, 1027):
        scores = scores.add_scores([Score(step, 0.0)])
        best = choose_best(scores)
        assert best is not None
        assert best.step == 1025
        assert (best.smoothed is None) == (step < 1027)


@given(scores=score_lists(round_values))
def test_raw_maximum_takes_the_earliest_of_equal_scores(scores: list[Score]) -> None:
    """The raw maximum is the highest score, and the earliest of several."""
    highest = [score for score in scores if all(score.value >= other.value for other in scores)]
    expected = BestCheckpoint(highest[0].step, highest[0].value, "raw_maximum") if highest else None
    assert find_highest(collect(scores, [])) == expected


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_score_is_never_best(bad: float) -> None:
    """NaN and infinities are skipped, and the best of the other scores is chosen."""
    scores = [Score(1, 0.5), Score(2, bad), Score(3, 0.7), Score(4, 0.6)]
    assert find_highest(collect(scores, [])) == BestCheckpoint(3, 0.7, "raw_maximum")
    assert choose(scores, [2]) is None


def add_noise(clean: list[float], sd: float, seed: int, stderr: float | None = None) -> list[Score]:
    """Scores with Gaussian noise at consecutive steps."""
    rng = random.Random(seed)
    return [Score(step, value + rng.gauss(0, sd), stderr) for step, value in enumerate(clean)]


@given(scores=score_lists(values), existing=existing_steps, stderr=st.sampled_from([None, 0.0, 1.0, math.nan, 1e308]))
def test_smoothed_score_is_finite(scores: list[Score], existing: set[int], stderr: float | None) -> None:
    """For any scores, the smoothed score is within the finite scores and its standard error is finite."""
    best = choose([Score(item.step, item.value, stderr) for item in scores], existing)
    if best is not None:
        finite = [item.value for item in scores if math.isfinite(item.value)]
        assert best.smoothed is not None
        assert best.smoothed_stderr is not None
        assert min(finite) <= best.smoothed <= max(finite)
        assert 0 <= best.smoothed_stderr <= sys.float_info.max


@given(length=st.integers(1, 60), peak=st.integers(0, 59), existing=st.sets(st.integers(0, 59)))
def test_smoothing_without_noise_equals_raw_maximum(length: int, peak: int, existing: set[int]) -> None:
    """On straight lines up to a peak and down, the smoothed maximum is the raw one."""
    scores = [Score(step, float(-abs(step - peak))) for step in range(length)]
    smoothed = choose(scores, existing)
    nearest = min(existing & set(range(length)), key=lambda step: (abs(step - peak), step), default=None)
    assert (smoothed and smoothed.step) == nearest


def test_single_outlier_is_not_the_smoothed_maximum() -> None:
    """A single score far above its neighbors is the raw maximum, but not the smoothed one."""
    hill = [1 - ((step - 60) / 60) ** 2 for step in range(100)]
    scores = add_noise(hill, 0.05, 1)
    scores[10] = Score(10, 3.0)
    raw, smoothed = find_highest(collect(scores, [])), choose(scores, range(100))
    assert raw is not None
    assert raw.step == 10
    assert smoothed is not None
    assert abs(smoothed.step - 60) < 15


def test_smoothing_loses_less_than_the_raw_maximum() -> None:
    """Over 60 noisy rises and falls, the smoothed choice loses less than half as much true score as the raw one."""
    hill = [1 - ((step - 60) / 60) ** 2 for step in range(100)]
    lost = {"raw_maximum": 0.0, "smoothed_maximum": 0.0}
    for seed in range(60):
        scores = add_noise(hill, 0.2, seed)
        for best in (find_highest(collect(scores, [])), choose(scores, range(100))):
            assert best is not None
            lost[best.chosen_by] += 1 - hill[best.step]
    assert lost["smoothed_maximum"] < 0.5 * lost["raw_maximum"]


def test_smoothed_standard_error_is_calibrated() -> None:
    """Over 400 flat runs the squared error of the smoothed score agrees with its standard error."""
    errors = []
    for seed in range(400):
        best = choose(add_noise([0.0] * 64, 1.0, seed, stderr=1.0), {30})
        assert best is not None
        assert best.smoothed is not None
        assert best.smoothed_stderr
        errors.append((best.smoothed / best.smoothed_stderr) ** 2)
    assert 0.75 < sum(errors) / len(errors) < 1.35


def test_scores_without_checkpoint_are_smoothed_over() -> None:
    """Of two checkpoints with equal scores, the one among higher scores is chosen."""
    ripple = [0.0, 0.1, -0.1] * 7
    scores = [Score(step, (1.0 if step > 10 else 0.0) + ripple[step]) for step in range(21)]
    scores[3], scores[17] = Score(3, 0.7), Score(17, 0.7)
    best = choose(scores, {3, 17})
    assert best is not None
    assert best.step == 17


def test_given_standard_errors_widen_the_window() -> None:
    """If the differences show no noise, the given standard errors are used."""
    scores = [Score(step, float(step == 20), stderr=1.0) for step in range(41)]
    best = choose(scores, range(41))
    assert best is not None
    assert best.smoothed is not None
    assert best.smoothed < 0.5
    assert best.smoothed_stderr is not None
    assert best.smoothed_stderr > 0.1
