"""A gated recurrent network in integer arithmetic: the same bits on every machine, for one run and for many.

Source      Cho et al. (arXiv 1406.1078) for the gates; the candidate as in PyTorch's GRU, whose weights it uses.
Numbers     Weights are 16-bit fractions of 2^12, features of 2^8, activations and the hidden state of 2^14. All are
            whole numbers in float64, and every sum stays below 2^53: so no order of summation, and no BLAS, can
            change a bit. tanh and the logistic function are looked up in tables of 2^10 entries a unit.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evalstop_detectors.errors import DetectorError
from evalstop_detectors.observation import Column, Columns, MetricRole
from evalstop_detectors.posterior.features import FEATURES, LIMIT, MANY, FeatureState, Given, advance
from evalstop_detectors.summation import LARGEST

Whole = NDArray[np.float64]
"""Whole numbers in float64."""

HIDDEN = 64
OUTPUTS = 5  # logit of `turned for good`, of `will turn`, and the 10, 50 and 90 % quantiles of what is still to come
WEIGHT_ONE, FEATURE_ONE, STATE_ONE = 2.0**12, 2.0**8, 2.0**14
SUM_ONE = WEIGHT_ONE * STATE_ONE
_TABLE_ONE = 2.0**10
_TABLE_END = 8 * int(_TABLE_ONE)
_FROM_SUM = _TABLE_ONE / SUM_ONE
_MIDDLE = _TABLE_END + 0.5  # the entry of 0, and a half for rounding

MODELS = {"gru-1": "1163b5b95895e5b93b743c24b1f4be9063eabda3abe5f61d373b15e23256b2ef"}
"""The shipped networks and the SHA-256 of their files. A name never changes its meaning."""


class UnknownModel(DetectorError):
    """There is no network of this name, or its file differs from the shipped one."""


class Network(NamedTuple):
    """The weights, as whole numbers or fractions of a power of 2.

    `of_inputs` (256, 91) and its offset (256,) are of the features and the hidden state, and give, 64 rows each: the
    table entries of the reset and the update gate, and what features and hidden state add to the candidate, as sums.
    `of_output` (5, 64) and its offset (5,) are of the hidden state.
    """

    of_inputs: Whole
    of_inputs_offset: Whole
    of_output: Whole
    of_output_offset: Whole

    def step(self, hidden: Whole, features: Whole) -> Whole:
        """The hidden state after one eval; both (64,) and (27,) or (64, runs) and (27, runs)."""
        sums = self.of_inputs @ np.concatenate((features, hidden))
        sums += self.of_inputs_offset if hidden.ndim == 1 else self.of_inputs_offset[:, None]
        gates = _take(_logistic_table(), sums[: 2 * HIDDEN])
        reset, update = gates[:HIDDEN], gates[HIDDEN:]
        candidate = sums[2 * HIDDEN : 3 * HIDDEN] + np.floor(sums[3 * HIDDEN :] * reset)
        candidate = look_up_tanh(candidate)
        return np.asarray(np.floor(candidate + update * (hidden - candidate) + 0.5))

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
    return float(_logistic_table().item(min(max(index, -_TABLE_END), _TABLE_END) + _TABLE_END))


def to_probabilities(logits: Whole) -> Whole:
    """`to_probability` of many."""
    return _take(_logistic_table(), np.floor(logits * _TABLE_ONE + 0.5) + _TABLE_END)


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


class Course(NamedTuple):
    """The result at each eval of a run: `outputs` of the network (5, evals), and fields of the features' state by the
    same names, (evals,)."""

    outputs: Floats
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
    outputs, columns_kept = np.zeros((longest, OUTPUTS, count)), np.zeros((longest, len(Course._fields) - 1, count))
    state, hidden = FeatureState(*(np.zeros(count) for _ in FeatureState.__struct_fields__)), np.zeros((HIDDEN, count))
    # Values past the largest number become infinite and are clipped, as with plain floats.
    with np.errstate(over="ignore", invalid="ignore"):
        for at in range(longest):
            going = int(np.count_nonzero(lengths > at))
            if going < len(state.evals):
                state = FeatureState(*(getattr(state, name)[:going] for name in FeatureState.__struct_fields__))
                hidden = hidden[:, :going]
            state, features = advance(MANY, state, Given(*columns[at, :, :going]))
            hidden = network.step(hidden, round_features(features))
            outputs[at, :, :going] = network.read(hidden)
            columns_kept[at, :, :going] = state.since, state.level, state.best, state.low
    return [Course(outputs[:n, :, index].T, *columns_kept[:n, :, index].T) for index, n in enumerate(lengths)]


_NO_VALUES = Column((), ())
_FAR = 1e100
"""Values up to this far from zero can be added up without clipping."""


def list_given(columns: Columns) -> Given | None:
    """The inputs at each finite eval, as arrays; None for runs that only `Posterior.step` can process: with paired
    evaluations, without a finite eval, or with a proxy so large that its sums would be clipped.

    The proxy counts by its mean since the last eval, relative to its first value, KL by its latest value since then.
    """
    evals = columns.get(MetricRole.EVAL, _NO_VALUES)
    values = np.array(evals.values, dtype=np.float64)
    finite = np.isfinite(values)
    count = int(np.count_nonzero(finite))
    if MetricRole.PAIRED in columns or not count:
        return None
    steps = np.array(evals.steps)[finite]
    stderr, progress = (_to_floats(column, finite) for column in (evals.stderrs, evals.progress))
    has_stderr = (stderr > 0) & (stderr < np.inf)
    proxy_at, proxies = _place(columns.get(MetricRole.PROXY, _NO_VALUES), steps)
    if np.any(np.abs(proxies) > _FAR):
        return None
    waiting = np.bincount(proxy_at, minlength=count + 1)[:count]
    total = np.bincount(proxy_at, proxies - proxies[:1], minlength=count + 1)[:count]
    kl_at, kls = _place(columns.get(MetricRole.KL, _NO_VALUES), steps)
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


def _place(column: Column, eval_steps: NDArray[np.int64]) -> tuple[NDArray[np.intp], Floats]:
    """The finite values of a column, and the index of the eval that each precedes; past the last eval: their count."""
    values = np.array(column.values, dtype=np.float64)
    finite = np.isfinite(values)
    return np.searchsorted(eval_steps, np.array(column.steps, dtype=np.int64)[finite]), values[finite]
