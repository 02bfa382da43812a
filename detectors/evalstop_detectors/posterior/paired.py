"""The evidence of paired evaluations beyond the curve: of the best and the current checkpoint on the same prompts.

Source      Original. A paired difference measures how far a run is below its best far better than the curve does, but
            not whether such a fall heals. How much it adds to the log odds that the run has turned is learned
            like the network: on runs of its prior that ask for paired evaluations and get them. One layer of 32 units
            gets the features that `gru-1` sees and 11 numbers of the latest answer; `gru-1.paired.int16` holds it, in
            integers like the network's. `gru-2` uses the same layer.
Certificate E = mean over b in {1/2, 1, 2, 4} of the product over all answers of exp(b z - b^2/2), with
            z = (fall - 0.05 gain)/stderr: an e-value against `never more than a twentieth of its gain below the best`,
            valid at any time. Dips make it large too; it is reported, and decides nothing.
Cut off     At most `MOST` is added to the network's log odds: no single answer decides alone.
"""

from __future__ import annotations

import hashlib
import math
from functools import cache
from importlib import resources

import numpy as np
from msgspec import Struct

from evalstop_detectors.posterior.features import (
    FIRST_FEATURES,
    LIMIT,
    Arithmetic,
    FeatureState,
    Number,
    measure_scale,
)
from evalstop_detectors.posterior.network import FEATURE_ONE, STATE_ONE, SUM_ONE, UnknownModel, Whole, look_up_tanh

PAIRED_FEATURES = 11
UNITS = 32
MOST, LEAST = 3.0, -8.0
LEAST_STDERR = 0.005  # of the unit
BETS = (0.5, 1.0, 2.0, 4.0)
NEGLIGIBLE_FALL = 0.05  # of the gain
_LARGEST_Z = 100.0
FILE, HASH = "gru-1.paired.int16", "cac8f532d5cf7e179534b15ddf0a495e761a187a9a3b90c671b9774cea893545"


class Answer(Struct, frozen=True, array_like=True):
    """The latest paired evaluation since the best: the best's score less the current one's, and its standard error.

    `curve_fall`: how far below the best the curve was then. `since`: evals since the best then. `before`: the fall of
    the previous answer, `has_before` whether there was one (0 or 1).
    """

    fall: Number
    stderr: Number
    curve_fall: Number
    since: Number
    before: Number = 0.0
    has_before: Number = 0.0


def describe_answer(ops: Arithmetic, s: FeatureState, answer: Answer) -> list[Number]:
    """The features of the latest answer at the current eval; the run is below its best."""
    noise, unit = measure_scale(ops, s)
    asinh = ops.asinh

    def cut(x: Number) -> Number:
        return ops.minimum(ops.maximum(x, -LIMIT), LIMIT)

    stderr = ops.maximum(answer.stderr, LEAST_STDERR * unit)
    since = ops.maximum(s.since, 1.0)
    return [
        cut(answer.fall / unit),
        asinh(answer.fall / noise),
        asinh(answer.fall / stderr),
        cut((answer.fall - answer.curve_fall) / unit),
        asinh((answer.fall - answer.curve_fall) / noise),
        ops.log2(1.0 + ops.maximum(since - answer.since, 0.0)) * 0.5,
        ops.log2(stderr / unit),
        ops.minimum(answer.since / since, 1.0),
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


def log_certificate(log_bets: tuple[float, ...]) -> float:
    """The decimal logarithm of the certificate, given each bet's log product; 0 before the first answer."""
    if not log_bets:
        return 0.0
    top = max(log_bets)
    return (top + math.log(math.fsum(math.exp(x - top) for x in log_bets) / len(log_bets))) / math.log(10)


def describe_effect(added: float | None, log_bets: tuple[float, ...]) -> str:
    """What the latest answer does to the odds, given what it adds to their logarithm; None: it precedes the best."""
    factor = math.exp(abs(added or 0.0))
    if added is None:
        effect = "paired evaluations before the best"
    elif factor < 1.05:
        effect = "a paired evaluation hardly changes the odds"
    else:
        verb = "multiplies" if added > 0 else "divides"
        effect = f"a paired evaluation {verb} the odds by {factor:.{0 if factor >= 10 else 1}f}"
    power = round(log_certificate(log_bets), 1)
    e_value = {0.0: "1", 1.0: "10"}.get(power, f"10^{power:g}")
    return f"{effect} (e-value {e_value})"


def raise_bets(log_bets: tuple[float, ...], fall: float, stderr: float, gain: float) -> tuple[float, ...]:
    """Each bet's log product after another answer."""
    excess = fall - NEGLIGIBLE_FALL * max(gain, 0.0)
    z = min(max(excess / stderr, -_LARGEST_Z), _LARGEST_Z)
    return tuple(x + b * z - b * b / 2 for x, b in zip(log_bets or (0.0,) * len(BETS), BETS, strict=True))


@cache
def _load() -> tuple[Whole, Whole, Whole, float]:
    """The layer's integer matrices; raises UnknownModel."""
    data = resources.files("evalstop_detectors.posterior").joinpath(FILE).read_bytes()
    if hashlib.sha256(data).hexdigest() != HASH:
        raise UnknownModel(f"The file {FILE} differs from the shipped one; reinstall the package.")
    return decode_layer(data)


def decode_layer(data: bytes) -> tuple[Whole, Whole, Whole, float]:
    """Decode a layer from 16-bit integers: weights (32, 38) and biases (32,), then weights (32,) and a bias."""
    numbers = np.frombuffer(data, dtype="<i2").astype(np.float64)
    inputs = FIRST_FEATURES + PAIRED_FEATURES
    inner, remaining = numbers[: UNITS * inputs].reshape(UNITS, inputs), numbers[UNITS * inputs :]
    return inner, remaining[:UNITS] * STATE_ONE, remaining[UNITS : 2 * UNITS], float(remaining[2 * UNITS] * STATE_ONE)
