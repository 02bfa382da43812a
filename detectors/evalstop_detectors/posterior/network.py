"""A gated recurrent network in integer arithmetic: the same bits on every machine, for one run and for many.

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
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evalstop_detectors.observation import NO_VALUES, Columns, MetricRole
from evalstop_detectors.posterior.features import FEATURES, LIMIT, MANY, PLAN, FeatureState, Given, advance
from evalstop_detectors.summation import FAR, LARGEST

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
        """The hidden state after one eval; both (64,) and (34,) or (64, runs) and (34, runs)."""
        sums = self.of_inputs @ np.concatenate((features, hidden))
        sums += self.of_inputs_offset if hidden.ndim == 1 else self.of_inputs_offset[:, None]
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
        plain numbers, (5,) or (5, runs). They are the same if no plan is known."""
        offset = self.of_output_offset if hidden.ndim == 1 else self.of_output_offset[:, None]
        outputs = self.of_output @ hidden
        outputs += offset
        outputs *= 1 / SUM_ONE
        unplanned = outputs[:OUTPUTS]
        # Fractions of 2^26 and of 2^11: their products, and sums of these, are exact.
        if hidden.ndim == 1:
            if not features.item(PLAN.start):
                return unplanned, unplanned
            return _describe_plan(*features[PLAN].tolist()) @ outputs[OUTPUTS:].reshape(PLAN_TERMS, OUTPUTS), unplanned
        of_plan = outputs[OUTPUTS:].reshape(PLAN_TERMS, OUTPUTS, -1)
        planned = (_describe_plan(*features[PLAN])[:, None] * of_plan).sum(axis=0)
        return np.where(features[PLAN.start] != 0, planned, unplanned), unplanned


def _describe_plan(told: Any, share: Any, remaining: Any) -> Whole:
    """The terms of a plan, (6,) or (6, runs): by its share that has passed, and the logarithm of what remains."""
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


def round_features(features: Any) -> Whole:
    """Features as whole numbers; for an array, runs are along the last axis if there are many."""
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


Floats = NDArray[np.float64]

_MOST_VALUES = 1 << 18
"""The most evals held at once, including the padding of shorter runs: about 40 MB."""


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


def list_probabilities(planned: Whole, unplanned: Whole) -> Whole:
    """`turned` of the outlooks of many outputs (5, evals); `unplanned` are log odds (evals,)."""
    odds = np.maximum(planned[0], unplanned)
    return _take(_logistic_table(), np.floor(odds * _TABLE_ONE + 0.5) + _TABLE_END)


class Course(NamedTuple):
    """The result at each eval of a run: `outputs` of the network (5, evals), the log odds without a plan, and fields of
    the features' state by the same names, (evals,)."""

    outputs: Floats
    unplanned: Floats
    since: Floats
    level: Floats
    best: Floats
    low: Floats


def follow_runs(network: Network, runs: Sequence[Given]) -> list[Course]:
    """The network's results at each eval of these runs, which are non-empty columns of finite numbers."""
    courses: dict[int, Course] = {}
    longest_first = sorted(range(len(runs)), key=lambda index: len(runs[index].score), reverse=True)
    for group in _group(longest_first, [len(run.score) for run in runs]):
        courses.update(zip(group, _follow_group(network, [runs[index] for index in group]), strict=True))
    return [courses[index] for index in range(len(runs))]


def _group(longest_first: Sequence[int], lengths: Sequence[int]) -> Iterator[Sequence[int]]:
    begin = 0
    while begin < len(longest_first):
        end = begin + max(_MOST_VALUES // lengths[longest_first[begin]], 1)
        yield longest_first[begin:end]
        begin = end


def _follow_group(network: Network, runs: Sequence[Given]) -> list[Course]:
    """The same for runs in descending order of length, so that the unfinished ones are always the first."""
    lengths = np.array([len(run.score) for run in runs])
    longest, count = int(lengths[0]), len(runs)
    columns = np.zeros((longest, len(Given._fields), count))
    for index, run in enumerate(runs):
        columns[: lengths[index], :, index] = np.transpose(run)
    outputs, unplanned = np.zeros((longest, OUTPUTS, count)), np.zeros((longest, count))
    columns_kept = np.zeros((longest, len(Course._fields) - 2, count))
    state, hidden = FeatureState(*(np.zeros(count) for _ in FeatureState.__struct_fields__)), np.zeros((HIDDEN, count))
    # Values past the largest number become infinite and are clipped, as with plain floats.
    with np.errstate(over="ignore", invalid="ignore"):
        for at in range(longest):
            going = int(np.count_nonzero(lengths > at))
            if going < len(state.evals):
                state = FeatureState(*(getattr(state, name)[:going] for name in FeatureState.__struct_fields__))
                hidden = hidden[:, :going]
            state, features = advance(MANY, state, Given(*columns[at, :, :going]))
            seen = round_features(features)
            hidden = network.step(hidden, seen)
            outputs[at, :, :going], without = network.read(hidden, seen)
            unplanned[at, :going] = without[0]
            columns_kept[at, :, :going] = state.since, state.level, state.best, state.low
    return [
        Course(outputs[:n, :, index].T, unplanned[:n, index], *columns_kept[:n, :, index].T)
        for index, n in enumerate(lengths)
    ]


def list_given(columns: Columns) -> Given | None:
    """The inputs at each finite eval, as arrays; None for runs that only `Posterior.step` can process: with paired
    evaluations, without a finite eval, or with a proxy so large that its sums would be clipped.

    The proxy counts by its mean since the last eval, relative to its first value, KL by its latest value since then.
    """
    evals = columns.get(MetricRole.EVAL, NO_VALUES)
    values = np.array(evals.values, dtype=np.float64)
    finite = np.isfinite(values)
    count = int(np.count_nonzero(finite))
    if MetricRole.PAIRED in columns or not count:
        return None
    steps = np.array(evals.steps)[finite]
    stderr, progress = (_to_floats(column, finite) for column in (evals.stderrs, evals.progress))
    has_stderr = (stderr > 0) & (stderr < np.inf)
    proxy_at, proxies = columns.get(MetricRole.PROXY, NO_VALUES).place_finite(steps)
    if np.any(np.abs(proxies) > FAR):
        return None
    waiting = np.bincount(proxy_at, minlength=count + 1)[:count]
    total = np.bincount(proxy_at, proxies - proxies[:1], minlength=count + 1)[:count]
    kl_at, kls = columns.get(MetricRole.KL, NO_VALUES).place_finite(steps)
    kl, has_kl = np.zeros(count + 1), np.zeros(count + 1)
    kl[kl_at], has_kl[kl_at] = np.clip(kls, -LARGEST, LARGEST), 1.0  # of several at one index the last stays
    return Given(
        np.clip(values[finite], -LARGEST, LARGEST),
        np.where(has_stderr, np.minimum(stderr, LARGEST), 0.0),
        has_stderr.astype(float),
        total / np.maximum(waiting, 1),
        (waiting > 0).astype(float),
        kl[:count],
        has_kl[:count],
        np.nan_to_num(progress, nan=0.0),
        (~np.isnan(progress)).astype(float),
    )


def _to_floats(values: Sequence[float | None] | None, finite: NDArray[np.bool_]) -> Floats:
    """The values at finite evals; NaN where unknown."""
    if values is None:
        return np.full(int(np.count_nonzero(finite)), np.nan)
    return np.array(values, dtype=np.float64)[finite]
