"""A gated recurrent network in integer arithmetic: the same bits on every machine, for one run and for many.

Source      Cho et al. (arXiv 1406.1078) for the gates; the candidate as in PyTorch's GRU, whose weights it uses.
Numbers     Weights are 16-bit fractions of 2^12, features of 2^8, activations and the hidden state of 2^14. All are
            whole numbers in float64, and every sum stays below 2^53: so no order of summation, and no BLAS, can
            change a bit. tanh and the logistic function are looked up in tables of 2^10 entries a unit.
"""

from __future__ import annotations

import hashlib
import math
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evalstop_detectors.errors import DetectorError
from evalstop_detectors.posterior.features import FEATURES, LIMIT

Whole = NDArray[np.float64]
"""Whole numbers in float64."""

HIDDEN = 64
OUTPUTS = 5  # logit of `turned for good`, of `will turn`, and the 10, 50 and 90 % quantiles of what is still to come
WEIGHT_ONE, FEATURE_ONE, STATE_ONE = 2.0**12, 2.0**8, 2.0**14
SUM_ONE = WEIGHT_ONE * STATE_ONE
_RAISE = STATE_ONE / FEATURE_ONE
_TABLE_ONE = 2.0**10
_TABLE_END = 8 * int(_TABLE_ONE)
_FROM_SUM = _TABLE_ONE / SUM_ONE

MODELS = {"gru-1": "1163b5b95895e5b93b743c24b1f4be9063eabda3abe5f61d373b15e23256b2ef"}
"""The shipped networks and the SHA-256 of their files. A name never changes its meaning."""


class UnknownModel(DetectorError):
    """There is no network of this name, or its file differs from the shipped one."""


class Network(NamedTuple):
    """Matrices of whole numbers for the features, the hidden state and the outputs, each with its bias.

    Shapes: (192, 27), (192,), (192, 64), (192,), (5, 64), (5,). The rows are those of the reset gate, the update gate
    and the candidate.
    """

    of_features: Whole
    of_features_offset: Whole
    of_state: Whole
    of_state_offset: Whole
    of_output: Whole
    of_output_offset: Whole

    def step(self, hidden: Whole, features: Whole) -> Whole:
        """The hidden state after one eval; both (64,) and (27,) or (64, runs) and (27, runs)."""
        of_features = (self.of_features @ features) * _RAISE
        of_state = self.of_state @ hidden
        if hidden.ndim == 1:
            of_features += self.of_features_offset
            of_state += self.of_state_offset
        else:
            of_features += self.of_features_offset[:, None]
            of_state += self.of_state_offset[:, None]
        gates = _look_up(_logistic_table(), of_features[: 2 * HIDDEN] + of_state[: 2 * HIDDEN])
        reset, update = gates[:HIDDEN], gates[HIDDEN:]
        candidate = of_features[2 * HIDDEN :] + np.floor(of_state[2 * HIDDEN :] * reset * (1 / STATE_ONE))
        candidate = _look_up(_tanh_table(), candidate)
        return np.asarray(np.floor(((STATE_ONE - update) * candidate + update * hidden) * (1 / STATE_ONE) + 0.5))

    def read(self, hidden: Whole) -> Whole:
        """The outputs (5,) or (5, runs): both logits and three quantiles, as plain numbers."""
        offset = self.of_output_offset if hidden.ndim == 1 else self.of_output_offset[:, None]
        return np.asarray((self.of_output @ hidden + offset) * (1 / SUM_ONE))


def round_features(features: Any) -> Whole:
    """Features as whole numbers; for an array, runs are along the last axis if there are many."""
    values = np.asarray(features, dtype=np.float64)
    return np.asarray(np.floor(np.minimum(np.maximum(values, -LIMIT), LIMIT) * FEATURE_ONE + 0.5))


def to_probability(logit: float) -> float:
    """The logistic function, from the table: steps of 2^-14 between 0 and 1."""
    index = math.floor(logit * _TABLE_ONE + 0.5)
    return float(_logistic_table().item(min(max(index, -_TABLE_END), _TABLE_END) + _TABLE_END)) / STATE_ONE


def to_probabilities(logits: Whole) -> Whole:
    """`to_probability` of many."""
    index = np.floor(logits * _TABLE_ONE + 0.5) + _TABLE_END
    return np.asarray(_logistic_table().take(index.astype(np.int64), mode="clip") / STATE_ONE)


@cache
def load_network(name: str) -> Network:
    """The shipped network of this name; raises UnknownModel."""
    if name not in MODELS:
        raise UnknownModel(f"There is no model {name!r}; available: {', '.join(sorted(MODELS))}.")
    data = resources.files("evalstop_detectors.posterior").joinpath(f"{name}.int16").read_bytes()
    if hashlib.sha256(data).hexdigest() != MODELS[name]:
        raise UnknownModel(f"The file of model {name} differs from the shipped one; reinstall the package.")
    return decode_network(data)


def decode_network(data: bytes) -> Network:
    """Decode a network: its six arrays one after the other, as little-endian 16-bit integers."""
    numbers = np.frombuffer(data, dtype="<i2").astype(np.float64)
    rows = 3 * HIDDEN
    shapes = ((rows, FEATURES), (rows,), (rows, HIDDEN), (rows,), (OUTPUTS, HIDDEN), (OUTPUTS,))
    arrays, begin = [], 0
    for shape in shapes:
        end = begin + math.prod(shape)
        arrays.append(numbers[begin:end].reshape(shape))
        begin = end
    of_features, a, of_state, b, of_output, c = arrays
    return Network(of_features, a * STATE_ONE, of_state, b * STATE_ONE, of_output, c * STATE_ONE)


def look_up_tanh(sums: Whole) -> Whole:
    """tanh of sums of activations and weights, as activations."""
    return np.asarray(_look_up(_tanh_table(), sums))


def _look_up(table: Whole, sums: Any) -> Any:
    # The nearest entry, clipped to the first and the last. A cast rounds non-negative numbers down.
    return table.take((sums * _FROM_SUM + (_TABLE_END + 0.5)).astype(np.int64), mode="clip")


@cache
def _tanh_table() -> Whole:
    return np.array([_rounded(math.tanh(i / _TABLE_ONE)) for i in range(-_TABLE_END, _TABLE_END + 1)])


@cache
def _logistic_table() -> Whole:
    return np.array([_rounded(0.5 + 0.5 * math.tanh(0.5 * i / _TABLE_ONE)) for i in range(-_TABLE_END, _TABLE_END + 1)])


def _rounded(value: float) -> float:
    """Round to a fraction of 2^14. No entry lies within 1e-9 of a boundary, so the last bits of tanh do not matter."""
    return math.floor(value * STATE_ONE + 0.5)
