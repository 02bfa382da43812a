"""Who answers a request to evaluate now in a labeled run: best checkpoint and current one, on the same prompts.

Every eval has a checkpoint. The difference of two evals on shared prompts whose errors correlate by `CORRELATION` has
the variance 2 sd^2 (1 - rho) / m, m times as many prompts as usual; the answer comes before the next eval.
"""

from __future__ import annotations

import math
import zlib

import numpy as np
from evalstop_detectors import BestSoFar, EvalRequest, MetricRole, Observation, Score, SmoothedMaximum

from evalstop_lab.worlds.world import World

CORRELATION = 0.5


class Evaluator:
    """Follows a run, and answers for the step at which it is."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._index = {step: index for index, step in enumerate(world.steps.tolist())}
        self._best = BestSoFar(SmoothedMaximum())
        self._rng = np.random.default_rng([zlib.crc32(world.family.encode()), world.seed, 4])

    def observe(self, observation: Observation) -> None:
        """See an observation of the run."""
        if observation.role is MetricRole.EVAL:
            self._best.add(Score(observation.step, observation.value, observation.stderr))
            self._best.saved(observation.step)

    def answer(self, request: EvalRequest, progress: float | None) -> Observation:
        """The paired evaluation that is asked for at the last step that was observed."""
        best = self._best.best()
        assert best is not None, "it is asked for after evals"
        truth = self._world.truth
        difference = truth.eval_scores[self._index[request.step]] - truth.eval_scores[self._index[best.step]]
        stderr = (truth.noise_sd or 0.0) * math.sqrt(2 * (1 - CORRELATION) / request.multiplier)
        value = float(difference + stderr * self._rng.standard_normal())
        return Observation(MetricRole.PAIRED, request.step, value, stderr, progress)
