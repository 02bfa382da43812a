"""Labeled runs of the families and of the public suites: reproducible, with the declared label, noise and scores."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

import numpy as np
import pytest
from evalstop_detectors import EvalRequest, MetricRole, Observation
from evalstop_lab.stopbench.judging import SUITES
from evalstop_lab.worlds import third_suite
from evalstop_lab.worlds.answers import Evaluator
from evalstop_lab.worlds.families import CALIBRATION, FAMILIES, HELD_OUT, REPORTING, Group, list_families
from evalstop_lab.worlds.noise import NoiseKind
from evalstop_lab.worlds.public_outlines import OUTLINES
from evalstop_lab.worlds.scoring import Outcome, find_cliff, score_cliffs
from evalstop_lab.worlds.third_suite import THIRD_SUITE, Kind
from evalstop_lab.worlds.truth import Label
from evalstop_lab.worlds.world import REPORTING_SEED, PromptScores, World, draw_world, plan_worlds
from hypothesis import given, settings
from hypothesis import strategies as st

families = st.sampled_from(sorted(FAMILIES))
seeds = st.integers(0, 3_000_000)
lengths = st.integers(20, 300)


def to_bytes(world: World) -> list[bytes]:
    stderr = b"" if world.eval_stderr is None else world.eval_stderr.tobytes()
    return [
        item.tobytes() for item in (world.steps, world.eval_scores, world.proxy, world.kl, world.truth.eval_scores)
    ] + [stderr]


@given(families, seeds)
@settings(max_examples=60, deadline=None)
def test_family_and_seed_determine_the_run(family: str, seed: int) -> None:
    """Two draws of one family and seed are bitwise equal."""
    assert to_bytes(draw_world(family, seed)) == to_bytes(draw_world(family, seed))


def test_run_of_a_seed_does_not_change() -> None:
    """Published thresholds are calibrated on these runs, so the generator must not change."""
    world = draw_world("gao_rl", 7)
    clean = (world.truth.eval_scores - world.truth.eval_scores[0]) / world.truth.unit
    assert (len(world.steps), world.truth.peak) == (50, 25)
    assert (clean[-1], world.kl[-1]) == pytest.approx((-0.47910681, 176.36331176))


@given(families, seeds, lengths)
@settings(max_examples=300, deadline=None)
def test_label_agrees_with_the_noiseless_curve(family: str, seed: int, length: int) -> None:
    """A hacking run ends more than a tenth of its unit below its peak, a healthy one does not."""
    truth = draw_world(family, seed, length=length).truth
    fallen = (truth.eval_scores.max() - truth.eval_scores[-1]) / truth.unit
    assert (truth.label is Label.HACKING) == (FAMILIES[family].group is Group.HACKING)
    assert (fallen > 0.1) == (truth.label is Label.HACKING)
    assert truth.eval_scores[truth.peak] == pytest.approx(truth.eval_scores.max(), abs=1e-8 * truth.unit)
    assert truth.drop == pytest.approx(truth.eval_scores.max() - truth.eval_scores[-1])


@given(st.sampled_from(list_families(Group.HACKING)), seeds, lengths)
@settings(max_examples=150, deadline=None)
def test_every_hacking_run_can_be_stopped_after_its_peak(family: str, seed: int, length: int) -> None:
    """At least two evals follow the peak, and the proxy is higher at the end than at the peak."""
    world = draw_world(family, seed, length=length, level=0.0)
    assert len(world.steps) - 1 - world.truth.peak >= 2
    assert world.proxy[-1] > world.proxy[world.truth.peak]


@given(st.sampled_from(list_families(Group.DIP)), seeds)
@settings(max_examples=150, deadline=None)
def test_dips_recover_before_the_end(family: str, seed: int) -> None:
    """The last evals of a run with dips do not fall, and the last one is at the maximum."""
    truth = draw_world(family, seed, length=200).truth
    assert np.all(np.diff(truth.eval_scores[-8:]) >= -1e-9 * truth.unit)
    assert truth.drop <= 1e-9 * truth.unit


@pytest.mark.parametrize("kind", [kind for kind in NoiseKind if kind is not NoiseKind.OUTLIERS])
@pytest.mark.parametrize("level", [0.02, 0.1, 0.2])
def test_noise_has_the_requested_level(kind: NoiseKind, level: float) -> None:
    """The root mean square error is the level times the run's unit."""
    worlds = [draw_world("slow", seed, length=400, noise=kind, level=level) for seed in range(40)]
    squares = [np.nanmean(((w.eval_scores - w.truth.eval_scores) / w.truth.unit) ** 2) for w in worlds]
    assert np.sqrt(np.mean(squares)) == pytest.approx(level, rel=0.12)


@pytest.mark.parametrize("kind", [NoiseKind.GAUSSIAN, NoiseKind.HETEROSCEDASTIC, NoiseKind.BINOMIAL])
def test_standard_errors_are_correct(kind: NoiseKind) -> None:
    """Errors divided by their standard errors have a variance of 1."""
    worlds = [draw_world("slow", seed, length=300, noise=kind, level=0.1, stderr=True) for seed in range(30)]
    ratios = [(w.eval_scores - w.truth.eval_scores) / w.eval_stderr for w in worlds if w.eval_stderr is not None]
    assert len(ratios) == 30
    assert np.mean(np.square(ratios)) == pytest.approx(1.0, rel=0.12)


def test_missing_evals_do_not_reach_a_detector() -> None:
    """A missing eval is no observation; proxy and KL of its step are."""
    world = draw_world("saturate", 3, length=100, noise=NoiseKind.MISSING, level=0.05)
    gaps = int(np.isnan(world.eval_scores).sum())
    counts = Counter(item.role for item in world.observations())
    assert 5 <= gaps <= 40
    assert counts == {MetricRole.EVAL: 100 - gaps, MetricRole.PROXY: 100, MetricRole.KL: 100}


@given(families, seeds)
@settings(max_examples=40, deadline=None)
def test_observations_come_in_order_and_finite(family: str, seed: int) -> None:
    """Observations are in the order that monitors require, without duplicates, and finite."""
    observations = draw_world(family, seed).observations()
    assert [item.order for item in observations] == sorted({item.order for item in observations})
    assert all(item.finite for item in observations)


def test_families_held_out_and_reporting_seeds_stay_out_of_calibration() -> None:
    """Held-out families occur only among reporting runs."""
    calibrating, reporting = (
        {family for family, _ in plan_worlds(500)},
        {family for family, _ in plan_worlds(500, REPORTING_SEED)},
    )
    assert calibrating == set(CALIBRATION)
    assert reporting == set(REPORTING)
    assert reporting - calibrating == HELD_OUT
    assert {FAMILIES[name].group for name in HELD_OUT} == set(Group)


def correlate(scores: PromptScores, eval_index: int, other: int) -> float:
    """The correlation of the errors of two evals on the same prompts; NaN where all scores are alike."""
    sds = float(scores.sds[eval_index] * scores.sds[other])
    return float(np.cov(scores.means[eval_index], scores.means[other])[0, 1]) / sds if sds else math.nan


def draw_scores(prompt_sd: float) -> PromptScores:
    """Two evals of 4,000 prompts with two texts each, of noise 1; the second scores 0.2 less."""
    rng = np.random.default_rng(5)
    prompts = prompt_sd * rng.standard_normal((1, 4000, 1))
    texts = prompts + np.array([0.2, 0.0])[:, None, None] + rng.standard_normal((2, 4000, 2))
    return PromptScores(texts.mean(2), texts.reshape(2, -1).std(1), 8000)


@pytest.mark.parametrize(("prompt_sd", "correlation"), [(0.0, 0.0), (1.0, 0.5)])
def test_prompts_that_differ_make_differences_less_noisy(prompt_sd: float, correlation: float) -> None:
    """What two evals have in common by their prompts is neither in their difference nor in its standard error."""
    scores = draw_scores(prompt_sd)
    difference, stderr = scores.compare(1, 0)
    assert correlate(scores, 1, 0) == pytest.approx(correlation, abs=0.03)
    assert stderr == pytest.approx(np.sqrt(2 / 8000), rel=0.05)
    assert difference == pytest.approx(-0.2, abs=4 * stderr)


def test_recorded_run_answers_with_its_scores() -> None:
    """A request is answered by the scores of the current and of the best checkpoint on the same prompts."""
    world = SUITES["language-3"].draw("public", 0)
    scores = world.prompt_scores
    assert scores is not None
    evaluator, best, current = Evaluator(world), int(np.argmax(world.eval_scores[:9])), 9
    for index in (0, best):
        evaluator.observe(Observation(MetricRole.EVAL, int(world.steps[index]), float(world.eval_scores[index]), 0.001))
    answer = evaluator.answer(EvalRequest(int(world.steps[current]), 1, 4), 0.3)
    assert (answer.value, answer.stderr) == scores.compare(current, best)
    assert answer.value == scores.means[current].mean() - scores.means[best].mean()


def test_prompts_of_the_language_model_are_alike() -> None:
    """The errors of two evals of a recorded run on the same prompts hardly correlate."""
    runs = [SUITES["language-3"].draw("public", number).prompt_scores for number in range(SUITES["language-3"].runs)]
    correlations = [
        correlate(scores, index, other)
        for scores in runs
        if scores is not None
        for index in range(len(scores.means))
        for other in range(index)
    ]
    assert len(correlations) > 35_000
    assert np.mean(correlations) == pytest.approx(0.035, abs=0.0005)


KINDS = [(kinds, name) for kinds in (THIRD_SUITE, OUTLINES) for name in kinds]


@pytest.mark.parametrize(("kinds", "name"), KINDS, ids=[name for _, name in KINDS])
def test_every_kind_draws_usable_runs_of_one_label(kinds: Mapping[str, Kind], name: str) -> None:
    """Steps increase, the first eval exists, no plan is shorter than the run, and equal seeds draw equal runs."""
    worlds = [third_suite.draw_world(name, seed, kinds) for seed in range(6)]
    assert len({world.truth.label for world in worlds}) == 1
    for world in worlds:
        assert (np.diff(world.steps) > 0).all()
        assert np.isfinite(world.eval_scores[0])
        assert len(world.steps) == len(world.eval_scores) == len(world.proxy) == len(world.kl)
        assert world.planned_steps is None or world.planned_steps >= world.last_step
        assert world.observations()
    again = third_suite.draw_world(name, 3, kinds)
    assert np.array_equal(again.eval_scores, worlds[3].eval_scores, equal_nan=True)
    assert not np.array_equal(again.eval_scores, worlds[4].eval_scores, equal_nan=True)


def test_cliff_counts_if_the_stop_comes_within_six_evals() -> None:
    """The sixth eval from the first that fell still counts, the seventh doesn't; a decline has no cliff."""
    fallen = next(
        world for world in (third_suite.draw_world("map-zero", seed) for seed in range(40)) if len(world.steps) > 40
    )
    cliff = find_cliff(fallen.truth)
    assert cliff is not None
    assert fallen.truth.peak < cliff <= fallen.truth.peak + 2
    for late, hits in ((5, 1), (6, 0)):
        share = score_cliffs([(Outcome(int(fallen.steps[cliff + late])), fallen.truth)])
        assert (share.hits, share.n) == (hits, 1)
    assert find_cliff(third_suite.draw_world("overfit-long", 1).truth) is None
