"""The evidence of paired evaluations beyond the curve: of the best and the current checkpoint on the same prompts.

Source      Original. A paired difference measures how far a run is below its best far better than the curve does, but
            not whether such a fall heals. How much it adds to the log odds that the run has turned is learned
            like the network: on runs of its prior that ask for paired evaluations and get them. One layer of 32 units
            gets the first 27 features of the run and 11 numbers of the latest answer; `paired.int16` holds it, in
            integers like the network's.
Cut off     At most `MOST` is added to the network's log odds: no single answer decides alone.
Again       The layer knows the latest answer only. Each further one that finds a sudden, deep fall adds `CONFIRMATION`:
            it rules out a changed grader, as which the network takes half of such falls. Chosen on StopBench's seeds
            `public`: where it counted for every fall, answers stopped runs in real dips.
"""

from __future__ import annotations

import math
import sys
from functools import cache
from importlib import resources

import numpy as np
from msgspec import Struct

from evalstop_detectors.posterior.features import LIMIT, FeatureState, asinh, log2, measure_scale
from evalstop_detectors.posterior.network import FEATURE_ONE, STATE_ONE, SUM_ONE, Whole, look_up_tanh

FIRST_FEATURES, PAIRED_FEATURES = 27, 11  # of the run, without what broke, and of the answer
UNITS = 32
MOST, LEAST = 3.0, -8.0
LEAST_STDERR = 0.005  # of the unit
CONFIRMATION = 1.5


class Answer(Struct, frozen=True, array_like=True):
    """The latest paired evaluation since the best: the best's score less the current one's, and its standard error.

    `curve_fall`: how far below the best the curve was then. `since`: evals since the best then. `before`: the fall of
    the previous answer, `has_before` whether there was one (0 or 1).
    """

    fall: float
    stderr: float
    curve_fall: float
    since: float
    before: float = 0.0
    has_before: float = 0.0


def describe_answer(s: FeatureState, answer: Answer) -> list[float]:
    """The features of the latest answer at the current eval; the run is below its best."""
    noise, unit = measure_scale(s)

    def cut(x: float) -> float:
        return min(max(x, -LIMIT), LIMIT)

    stderr = max(answer.stderr, LEAST_STDERR * unit)
    since = max(s.since, 1.0)
    return [
        cut(answer.fall / unit),
        asinh(answer.fall / noise),
        asinh(answer.fall / stderr),
        cut((answer.fall - answer.curve_fall) / unit),
        asinh((answer.fall - answer.curve_fall) / noise),
        log2(1.0 + max(since - answer.since, 0.0)) * 0.5,
        log2(min(stderr / unit, sys.float_info.max)),  # infinite where the range is subnormal
        min(answer.since / since, 1.0),
        cut((s.best - s.level - answer.curve_fall) / unit),
        cut(answer.before / unit) * answer.has_before,
        answer.has_before,
    ]


def add_log_odds(seen: Whole, answer: Whole) -> float:
    """What the latest answer adds to the log odds, by the features of the run and of the answer, rounded."""
    inner, offset, outer, last = _load()
    features = np.concatenate([seen[:FIRST_FEATURES], answer])
    hidden = look_up_tanh(inner @ features * (STATE_ONE / FEATURE_ONE) + offset)
    added = float(outer @ hidden + last) / SUM_ONE
    return min(max(added, LEAST), MOST)


def describe_effect(added: float) -> str:
    """What answers do to the odds, given what they add to their logarithm."""
    factor = math.exp(abs(added))
    if factor < 1.05:
        return "a paired evaluation hardly changes the odds"
    verb = "multiplies" if added > 0 else "divides"
    return f"a paired evaluation {verb} the odds by {factor:.{0 if factor >= 10 else 1}f}"


@cache
def _load() -> tuple[Whole, Whole, Whole, float]:
    """The layer's integer matrices."""
    return decode_layer(resources.files("evalstop_detectors.posterior").joinpath("paired.int16").read_bytes())


def decode_layer(data: bytes) -> tuple[Whole, Whole, Whole, float]:
    """Decode a layer from 16-bit integers: weights (32, 38) and biases (32,), then weights (32,) and a bias."""
    numbers = np.frombuffer(data, dtype="<i2").astype(np.float64)
    inputs = FIRST_FEATURES + PAIRED_FEATURES
    inner, remaining = numbers[: UNITS * inputs].reshape(UNITS, inputs), numbers[UNITS * inputs :]
    return inner, remaining[:UNITS] * STATE_ONE, remaining[UNITS : 2 * UNITS], float(remaining[2 * UNITS] * STATE_ONE)
