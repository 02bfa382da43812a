"""A gated recurrent network in integer arithmetic: the same bits on every machine.

Source      Cho et al. (arXiv 1406.1078) for the gates; the candidate as in PyTorch's GRU, whose weights it uses.
Numbers     Weights are 16-bit fractions of 2^12, features of 2^8, activations and the hidden state of 2^14. All are
            whole numbers in float64, and every sum stays below 2^53: so no order of summation, and no BLAS, can
            change a bit. tanh and the logistic function are looked up in tables of 2^10 entries a unit.
Plan        The hidden state does not depend on the planned length: the outputs for a run with a plan are sums of
            products of linear outputs and six numbers of the plan. So each eval gives the odds with the plan and
            without it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evalstop_detectors.posterior.features import FEATURES, LIMIT, PLAN

Whole = NDArray[np.float64]
"""Whole numbers in float64."""

HIDDEN = 64
PLAN_TERMS = 6
OUTPUTS = 5  # logit of `turned for good`, of `will turn`, and the 10, 50 and 90 % quantiles of what is still to come
WEIGHT_ONE, FEATURE_ONE, STATE_ONE = 2.0**12, 2.0**8, 2.0**14
SUM_ONE = WEIGHT_ONE * STATE_ONE
_TABLE_ONE = 2.0**10
_TABLE_END = 8 * int(_TABLE_ONE)
_FROM_SUM = _TABLE_ONE / SUM_ONE
_TERM_ONE = 2.0**11
_MIDDLE = _TABLE_END + 0.5  # the entry of 0, and a half for rounding


class Network(NamedTuple):
    """The weights, as whole numbers or fractions of a power of 2.

    `of_inputs` (256, features + 64) and its offset (256,) are of the features and the hidden state, and give, 64 rows
    each: the table entries of the reset and the update gate, and what features and hidden state add to the candidate,
    as sums. `of_output` (35, 64) and its offset are of the hidden state: the outputs, and five for each term of the
    plan.
    """

    of_inputs: Whole
    of_inputs_offset: Whole
    of_output: Whole
    of_output_offset: Whole

    def step(self, hidden: Whole, features: Whole) -> Whole:
        """The hidden state after one eval; (64,) and (34,)."""
        sums = self.of_inputs @ np.concatenate((features, hidden))
        sums += self.of_inputs_offset
        gates = _take(_logistic_table(), sums[: 2 * HIDDEN])
        reset, update = gates[:HIDDEN], gates[HIDDEN:]
        candidate = np.floor(sums[3 * HIDDEN :] * reset)
        candidate += sums[2 * HIDDEN : 3 * HIDDEN]
        candidate = look_up_tanh(candidate)
        latest = hidden - candidate
        latest *= update
        latest += candidate
        latest += 0.5
        return np.asarray(np.floor(latest, out=latest))

    def read(self, hidden: Whole, features: Whole) -> tuple[Whole, Whole]:
        """The outputs with the plan that these features tell, and without any: both logits and three quantiles, as
        plain numbers. They are the same if no plan is known."""
        outputs = self.of_output @ hidden
        outputs += self.of_output_offset
        outputs *= 1 / SUM_ONE
        unplanned = outputs[:OUTPUTS]
        if not features.item(PLAN.start):
            return unplanned, unplanned
        # Fractions of 2^26 and of 2^11: their products, and sums of these, are exact.
        return _describe_plan(*features[PLAN].tolist()) @ outputs[OUTPUTS:].reshape(PLAN_TERMS, OUTPUTS), unplanned


def _describe_plan(told: float, share: float, remaining: float) -> Whole:
    """The six terms of a plan: by its share that has passed, and the logarithm of what remains."""
    share, remaining = share * (1 / FEATURE_ONE), remaining * (0.25 / FEATURE_ONE)
    # The products are rounded to fractions of 2^11.
    square = (share * share * _TERM_ONE + 0.5) // 1.0 * (1 / _TERM_ONE)
    both = (share * remaining * _TERM_ONE + 0.5) // 1.0 * (1 / _TERM_ONE)
    far = (remaining * remaining * _TERM_ONE + 0.5) // 1.0 * (1 / _TERM_ONE)
    return np.array([told * (1 / FEATURE_ONE), share, square, remaining, both, far])


def forget_plan(features: Whole) -> Whole:
    """The features of a run without a plan."""
    forgotten = features.copy()
    forgotten[PLAN] = 0.0
    return forgotten


def round_features(features: Sequence[float]) -> Whole:
    """Features as whole numbers."""
    values = np.maximum(np.asarray(features, dtype=np.float64), -LIMIT)
    np.minimum(values, LIMIT, out=values)
    values *= FEATURE_ONE
    values += 0.5
    return np.asarray(np.floor(values, out=values))


def to_probability(logit: float) -> float:
    """The logistic function, from the table: steps of 2^-14 between 0 and 1."""
    index = math.floor(logit * _TABLE_ONE + 0.5)
    return float(_logistic_table().item(min(max(index, -_TABLE_END), _TABLE_END) + _TABLE_END))


@cache
def load_network() -> Network:
    """The shipped network."""
    return decode_network(resources.files("evalstop_detectors.posterior").joinpath("network.int16").read_bytes())


def decode_network(data: bytes) -> Network:
    """Decode a network: its six arrays one after the other, as little-endian 16-bit integers."""
    numbers = np.frombuffer(data, dtype="<i2").astype(np.float64)
    rows, outputs = 3 * HIDDEN, OUTPUTS * (1 + PLAN_TERMS)
    shapes = ((rows, FEATURES), (rows,), (rows, HIDDEN), (rows,), (outputs, HIDDEN), (outputs,))
    arrays, begin = [], 0
    for shape in shapes:
        end = begin + math.prod(shape)
        arrays.append(numbers[begin:end].reshape(shape))
        begin = end
    of_features, a, of_state, b, of_output, c = arrays
    # All factors are powers of 2, and the sums whole multiples of 2^-16: no rounding.
    of_features, a, b = of_features * (STATE_ONE / FEATURE_ONE), a * STATE_ONE, b * STATE_ONE
    gates, unused = slice(2 * HIDDEN), np.zeros((HIDDEN, HIDDEN))
    of_gates = np.hstack([of_features[gates], of_state[gates]]) * _FROM_SUM
    of_candidate = np.block([[of_features[2 * HIDDEN :], unused], [unused[:, :FEATURES], of_state[2 * HIDDEN :]]])
    return Network(
        np.vstack([of_gates, of_candidate]),
        np.concatenate([(a[gates] + b[gates]) * _FROM_SUM + _MIDDLE, a[2 * HIDDEN :], b[2 * HIDDEN :]]),
        of_output,
        c * STATE_ONE,
    )


def look_up_tanh(sums: Whole) -> Whole:
    """tanh of sums of activations and weights, as activations."""
    return _take(_tanh_table(), sums * _FROM_SUM + _MIDDLE)


def _take(table: Whole, entries: Whole) -> Whole:
    # The nearest entry, clipped to the first and the last. A cast rounds non-negative numbers down.
    return np.asarray(table.take(entries.astype(np.int64), mode="clip"))


@cache
def _tanh_table() -> Whole:
    return np.array([_rounded(math.tanh(i / _TABLE_ONE)) for i in range(-_TABLE_END, _TABLE_END + 1)])


@cache
def _logistic_table() -> Whole:
    """The logistic function, from 0 to 1."""
    values = (0.5 + 0.5 * math.tanh(0.5 * i / _TABLE_ONE) for i in range(-_TABLE_END, _TABLE_END + 1))
    return np.array([_rounded(value) / STATE_ONE for value in values])


def _rounded(value: float) -> float:
    """Round to a fraction of 2^14. No entry lies within 1e-9 of a boundary, so the last bits of tanh do not matter."""
    return math.floor(value * STATE_ONE + 0.5)


class Outlook(NamedTuple):
    """The network's forecast for a run: the probability that it has turned for good, and the 10, 50 and 90 % quantiles
    of what its eval score may still gain, as shares of the range that it has covered.

    `is_doubted`: without its plan the run is more likely to have turned, and `turned` is that probability.
    """

    turned: float
    to_gain: tuple[float, float, float]
    is_doubted: bool = False

    @property
    def covered(self) -> float:
        """The covered share of the run's final range, a lower bound with 90 % probability; two decimals."""
        return math.floor(100 / (1 + self.to_gain[2])) / 100


def to_outlook(planned: Whole, unplanned: Whole, added: tuple[float, float]) -> Outlook:
    """Decode the network's outputs with the plan and without, with `added` to each of their log odds."""
    outputs = planned.tolist()
    odds = (outputs[0] + added[0], unplanned.item(0) + added[1])
    low, middle, high = sorted(max(share, 0.0) for share in outputs[2:])
    return Outlook(to_probability(max(odds)), (low, middle, high), odds[1] > odds[0])
