"""The network over many whole runs at once: the sums of `Network.step` as matrix products, bitwise equal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evalstop_detectors.posterior.arithmetic import MANY
from evalstop_detectors.posterior.features import FeatureState, Given, advance
from evalstop_detectors.posterior.network import HIDDEN, OUTPUTS, Network, round_features

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
