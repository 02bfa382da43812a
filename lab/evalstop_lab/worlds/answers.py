"""Paired evaluations of a labeled run: the best checkpoint and the current one, on the same prompts.

Every eval has a checkpoint, and the result arrives before the next eval. Recorded runs with scores by prompt answer
with these. The others are simulated: if the errors of two evals on the same prompts correlate by rho = `CORRELATION`,
their difference on m times as many prompts as usual has the variance 2 sd^2 (1 - rho) / m.
"""

from __future__ import annotations

import math
import zlib

import numpy as np
from evalstop_detectors import EvalRequest, MetricRole, Observation, Score, Scores, choose_best

from evalstop_lab.worlds.world import World

CORRELATION = 0.5


class Evaluator:
    """Follows one run and answers requests for paired evaluations of its current checkpoint."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._index = {step: index for index, step in enumerate(world.steps.tolist())}
        self._scores = Scores()
        self._rng = np.random.default_rng([zlib.crc32(world.family.encode()), world.seed, 4])

    def observe(self, observation: Observation) -> None:
        """Add the run's next observation."""
        if observation.role is MetricRole.EVAL:
            score = Score(observation.step, observation.value, observation.stderr)
            self._scores = self._scores.add_scores([score]).add_checkpoints({score.step: ""})

    def answer(self, request: EvalRequest, progress: float | None) -> Observation:
        """The requested paired evaluation, at the last observed step."""
        best = choose_best(self._scores)
        assert best is not None, "a request follows an eval"
        current, best_one = self._index[request.step], self._index[best.step]
        if self._world.prompt_scores is not None:
            value, stderr = self._world.prompt_scores.compare(current, best_one)
        else:
            truth = self._world.truth
            stderr = (truth.noise_sd or 0.0) * math.sqrt(2 * (1 - CORRELATION) / request.multiplier)
            difference = truth.eval_scores[current] - truth.eval_scores[best_one]
            value = float(difference + stderr * self._rng.standard_normal())
        return Observation(MetricRole.PAIRED, request.step, value, stderr, progress)
