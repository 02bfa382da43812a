"""The collapse detector: sudden falls that stay, what confirms them, and what looks like them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from evalstop_detectors import MetricRole, Observation
from evalstop_detectors.detectors.collapse import Collapse
from numpy.typing import NDArray

from tests.detectors.strategies import collect_evidence, eval_series

Floats = NDArray[np.float64]

EVALS, AT = 120, 50
FALLEN = np.arange(EVALS) >= AT


def draw_rise(rng: np.random.Generator, noise: float) -> Floats:
    """A rise to 1 at eval `AT` that flattens out, with noise."""
    rise = 1 - np.exp(-np.arange(EVALS) / (AT / 2))
    scores: Floats = rise / rise[AT - 1] + noise * rng.standard_normal(EVALS)
    return scores


def draw_fall(rng: np.random.Generator, depth: float, noise: float = 0.08) -> Floats:
    """The same, with a fall by `depth` at eval `AT`."""
    return np.where(FALLEN, 1 - depth + noise * rng.standard_normal(EVALS), draw_rise(rng, 0.08))


def draw_half_fall(rng: np.random.Generator) -> Floats:
    """A fall by 0.55 with less noise: more is left than a dead model has."""
    scores: Floats = draw_rise(rng, 0.04)
    return np.where(FALLEN, 0.45 + 0.04 * rng.standard_normal(EVALS), scores)


def find_stop(scores: Floats, proxy: Floats | None = None, kl: Floats | None = None) -> tuple[int, int | None] | None:
    """The eval at which the detector stops the run, and the turn that it names."""
    series = {MetricRole.KL: kl, MetricRole.PROXY: proxy, MetricRole.EVAL: scores}
    observations = [
        Observation(role, step, values[step])
        for step in range(len(scores))
        for role, values in series.items()
        if values is not None
    ]
    evidence = zip(observations, collect_evidence(Collapse(), observations), strict=True)
    return next(((item.step, latest.turn_step) for item, latest in evidence if latest.value >= 1), None)


def draw_proxy(rng: np.random.Generator) -> Floats:
    """A proxy that rises all the time."""
    proxy: Floats = np.linspace(0, 1.5, EVALS) + 0.03 * rng.standard_normal(EVALS)
    return proxy


def draw_kl(rng: np.random.Generator) -> Floats:
    kl: Floats = 0.1 * np.arange(1, EVALS + 1) * (1 + 0.03 * rng.standard_normal(EVALS))
    return kl


def count_stops(draw: Callable[[np.random.Generator], list[Floats]], last: int = EVALS) -> int:
    """How many of 100 runs, drawn as scores and perhaps proxy and KL, are stopped at the fall or up to eval `last`."""
    stops = (find_stop(*draw(np.random.default_rng(seed))) for seed in range(100))
    return sum(stop is not None and AT <= stop[0] <= last for stop in stops)


@pytest.mark.parametrize(("depth", "noise"), [(1.0, 0.02), (1.5, 0.08)], ids=["to its start", "below the start"])
def test_fall_below_the_start_is_stopped_at_the_sixth_eval(depth: float, noise: float) -> None:
    """A model that dies is nearly certain within six evals, and its turn is the eval before."""
    stops = [find_stop(draw_fall(np.random.default_rng(seed), depth, noise)) for seed in range(100)]
    assert stops.count((AT + 5, AT - 1)) > 93


def test_fall_that_leaves_a_third_of_the_rise_is_stopped() -> None:
    """However old the run is: a stricter grader hardly ever takes most of what a run has gained."""
    old = np.repeat(1.0, 400)
    for seed in range(3):
        rng = np.random.default_rng(seed)
        scores = np.concatenate([draw_rise(rng, 0.05)[:AT], old, np.full(9, 0.3)])
        stop = find_stop(scores)
        assert stop is not None
        assert stop[0] == AT + 405


@pytest.mark.parametrize("factor", [3.5, 60.0])
def test_jump_of_kl_confirms_a_fall(factor: float) -> None:
    """A fall by 0.7 of the gain is certain within four evals if KL becomes several times as large."""
    jump = np.where(FALLEN, factor, 1.0)
    assert count_stops(lambda rng: [draw_fall(rng, 0.7), draw_proxy(rng), draw_kl(rng) * jump], AT + 2) <= 5
    assert count_stops(lambda rng: [draw_fall(rng, 0.7), draw_proxy(rng), draw_kl(rng) * jump], AT + 3) > 93


@pytest.mark.parametrize("move", [-0.7, 1.5])
def test_jump_of_the_proxy_confirms_a_fall(move: float) -> None:
    """So it is, after a fifth of the evals before it, if the proxy falls along or is exploited."""
    assert count_stops(lambda rng: [draw_half_fall(rng), draw_proxy(rng) + move * FALLEN], AT + 9) > 93
    assert count_stops(lambda rng: [draw_half_fall(rng), draw_proxy(rng) + move * FALLEN], AT + 8) <= 5


def test_changed_grader_is_only_suspect() -> None:
    """Only the eval falls, to a level above the start: hardly any run is stopped, nearly all are suspect."""
    assert count_stops(lambda rng: [draw_fall(rng, 0.7), draw_proxy(rng), draw_kl(rng)]) <= 2
    assert count_stops(lambda rng: [draw_half_fall(rng)]) <= 5
    evidence = collect_evidence(Collapse(), eval_series(draw_half_fall(np.random.default_rng(0)).tolist()))
    assert evidence[AT + 3].value == pytest.approx(4 / 6)
    assert "a changed grader looks the same" in evidence[AT + 3].note


def judge_with_answers(answers: dict[int, tuple[float, float | None]]) -> list[float]:
    """The values at each eval of a run that falls by 0.55, with paired evaluations after these evals."""
    detector, state, values = Collapse(), Collapse().start(), []
    for item in eval_series(draw_half_fall(np.random.default_rng(0)).tolist()):
        state, evidence = detector.step(state, item)
        if item.step in answers:
            answer = Observation(MetricRole.PAIRED, item.step, *answers[item.step])
            state, evidence = detector.step(state, answer)
        values.append(evidence.value)
    return values


def test_paired_evaluation_confirms_a_fall() -> None:
    """One of many standard errors makes the sixth eval certain; one without or with a large error changes nothing."""
    assert judge_with_answers({AT + 3: (-0.55, 0.025)})[AT + 5] == 1.0
    for answer in ((-0.55, 0.3), (-0.55, None)):
        assert judge_with_answers({AT + 3: answer})[AT + 5] == 0.9


def test_paired_evaluation_that_finds_no_fall_clears_it() -> None:
    """The new level is where the run starts: the same scores are not suspect again."""
    assert max(judge_with_answers({AT + 2: (0.01, 0.025)})[AT + 2 :]) == 0.0


def test_fall_in_two_evals_is_sudden() -> None:
    """One eval may lie in between, and counts as fallen."""
    scores = np.concatenate([np.linspace(0, 1, 40), [0.55], np.zeros(10)])
    assert find_stop(scores) == (45, 39)
    jump = np.where(np.arange(len(scores)) >= 40, 60.0, 1.0)
    assert find_stop(scores, kl=0.1 * jump * np.arange(1, len(scores) + 1)) == (43, 39)


@pytest.mark.parametrize(("settles", "stop"), [(0.3, (48, 39)), (0.9, None)], ids=["below the line", "near the best"])
def test_spike_that_settles_lower_is_counted_anew(settles: float, stop: tuple[int, int] | None) -> None:
    """A score that falls far and heals by most of that has collapsed if it stays below the line where it settles."""
    scores = np.concatenate([np.linspace(0, 1, 40), [-8.0, -5.0, -2.0], np.full(30, settles)])
    assert find_stop(scores) == stop


def find_first_stop(planned: int | None) -> int | None:
    """Where a run is stopped whose first eval is far above the 39 others."""
    scores = np.concatenate([[1.0], 0.01 * np.random.default_rng(0).standard_normal(39)]).tolist()
    run = [
        Observation(MetricRole.EVAL, step, score, progress=planned and step / planned)
        for step, score in enumerate(scores)
    ]
    evidence = zip(run, collect_evidence(Collapse(), run), strict=True)
    return next((item.step for item, latest in evidence if latest.value >= 1), None)


def test_run_that_broke_before_its_second_eval_is_stopped_after_a_third_of_its_plan() -> None:
    """The first eval may have been lucky, so without a plan it is suspect only."""
    assert find_first_stop(40) == 14
    assert find_first_stop(12) == 6
    assert find_first_stop(None) is None


@pytest.mark.parametrize(
    "scores",
    [
        np.concatenate([np.linspace(0, 1, 40), np.zeros(5), np.ones(20)]),
        np.concatenate([np.linspace(0, 1, 40), np.linspace(0, 1, 12), np.ones(20)]),
        np.concatenate([np.linspace(0, 1, 40), np.linspace(1, 0, 40)]),
        np.concatenate([np.linspace(0, 1, 40), np.full(30, 0.7)]),
        np.concatenate([np.ones(5), np.zeros(40)]),
        np.zeros(60),
    ],
    ids=["five evals", "it heals", "a slow decline", "a shallow step", "no rise", "constant"],
)
def test_what_is_no_collapse_is_left_alone(scores: Floats) -> None:
    assert find_stop(scores) is None


def test_noise_alone_stops_no_run() -> None:
    """Of 100 plateaus with heavy-tailed noise, none is stopped."""
    rng = np.random.default_rng(1)
    assert all(find_stop(draw_rise(rng, 0) + 0.05 * rng.standard_t(3, EVALS)) is None for _ in range(100))
