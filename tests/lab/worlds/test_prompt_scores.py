"""Scores by prompt: paired evaluations of recorded runs, with the error that they state."""

from __future__ import annotations

import math

import numpy as np
import pytest
from evalstop_detectors import EvalRequest, MetricRole, Observation
from evalstop_lab.stopbench.judging import SUITES
from evalstop_lab.worlds.answers import Evaluator
from evalstop_lab.worlds.world import PromptScores


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
