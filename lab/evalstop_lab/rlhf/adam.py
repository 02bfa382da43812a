"""Adam (Kingma & Ba, arXiv 1412.6980) on one flat vector, as a state and a function."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from evalstop_lab.rlhf.task import Floats

MEAN_DECAY = 0.9
SQUARE_DECAY = 0.999
EPSILON = 1e-8


@dataclass(frozen=True, eq=False)
class Moments:
    """Running means of the gradient and of its square, both of the parameters' shape, after `count` updates."""

    mean: Floats
    square: Floats
    count: int = 0

    @staticmethod
    def zero(size: int) -> Moments:
        """Return the moments before the first update."""
        return Moments(np.zeros(size), np.zeros(size))


def ascend(parameters: Floats, gradient: Floats, moments: Moments, learning_rate: float) -> tuple[Floats, Moments]:
    """Take one step up the gradient; return the new parameters and moments."""
    count = moments.count + 1
    mean = MEAN_DECAY * moments.mean + (1 - MEAN_DECAY) * gradient
    square = SQUARE_DECAY * moments.square + (1 - SQUARE_DECAY) * gradient**2
    direction = (mean / (1 - MEAN_DECAY**count)) / (np.sqrt(square / (1 - SQUARE_DECAY**count)) + EPSILON)
    return parameters + learning_rate * direction, Moments(mean, square, count)
