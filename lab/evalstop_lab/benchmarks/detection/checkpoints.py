"""What each rule for the best checkpoint loses, by noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import evalstop_detectors
import numpy as np
from evalstop_detectors import Chooser, RawMaximum, Score

from evalstop_lab.worlds import LEVELS, World
from evalstop_lab.worlds.scoring import Outcome, eval_lost, mean

CHOOSERS: tuple[Chooser, ...] = (RawMaximum(), evalstop_detectors.SmoothedMaximum())


def checkpoint_losses(worlds: Sequence[World]) -> dict[str, dict[str, Any]]:
    """The mean share of the gain that the chosen eval lacks, by rule and noise; each run was left to its end."""
    return {
        chooser.name: {
            f"{level:g}": asdict(
                mean([_lost(chooser, world) for world in worlds if world.noise.level == level], seed=0)
            )
            for level in LEVELS
        }
        for chooser in CHOOSERS
    }


def _lost(chooser: Chooser, world: World) -> float:
    errors = np.full(len(world.steps), np.nan) if world.eval_stderr is None else world.eval_stderr
    scores = [
        Score(step, score, None if math.isnan(error) else error)
        for step, score, error in zip(world.steps.tolist(), world.eval_scores.tolist(), errors.tolist(), strict=True)
        if math.isfinite(score)
    ]
    best = chooser.choose(scores, {score.step for score in scores})
    lost = eval_lost(Outcome(None, best.step if best else None), world.truth)
    assert lost is not None, world.name  # every world has an eval
    return lost
