"""Combines several evals of one run into the one score that is watched: their standardized weighted mean.

    score(t) = offset + sum over the evals of factor * value(t),    factor ~ weight / scale

- **Scale.** The median of an eval's first 16 nonzero moves from one value to the next, taken after 1, 2, 4,
  8 and 16 of them, then fixed. Moves instead of levels: the spread of the first values reflects what the run learns,
  not the precision of the measurement, and levels have no common zero. A noisy eval counts less; nothing is calibrated.
- **Chaining.** When a scale is renewed, `offset` changes with the factors, so that the previous score stays valid: a
  change of weights does not move the score, and no earlier score changes. The unit is kept too: if all
  scales shrink alike, as in a run that slows down, nothing changes.
- **Missing values.** An eval keeps its last value for `CARRIED` evals; then the score is the mean of the others. When
  it returns, its move in between counts. A value that is not finite (or past 1e100) is a missing one; if no
  eval of a step is finite, neither is the score.
- **Steps.** A step is complete when all evals have arrived, or a later step begins. The score depends only on the set
  of values ordered by step, and the score of a step on no later value.
- **Required evals.** Where some evals are required, the score is the mean of the evals' best levels, minus the smallest
  loss among the required ones (standardized, since their own best levels): it falls only when all of them fall. One
  that is no longer measured keeps its last value.
- **Versions.** When the measurement of an eval changes, all evals start again.

The state holds at most 16 moves, 3 values and some numbers for each eval, whatever the run's length.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from evalstop_detectors.checkpoint.choice import Score
from evalstop_detectors.errors import OutOfOrder
from evalstop_detectors.summation import find_median

CARRIED = 3
"""The number of evals over which a missing value is replaced by the last one."""

MOVES = 16
"""The number of moves from which a scale is computed; it is renewed each time they have doubled, up to this."""

_LEVEL = 3  # values whose median is an eval's level: a single failed eval does not change it
_LARGEST, _SMALLEST = 1e100, 1e-100  # beyond these, products overflow
_ROUNDING = 1e-9  # of a value: smaller moves are rounding differences between two ways to compute it


class EvalValue(NamedTuple):
    """A value of one eval, identified by its index, with the sign such that higher is better."""

    step: int
    place: int
    value: float
    stderr: float | None = None
    eval_version: int = 0


class EvalState(Struct, frozen=True):
    """The state of one eval: its last values, newest last, its moves, and its level when the score was best.

    `missed`: evals since its last value. `factor`: its current factor in the score; 0 while it does not count.
    `best_level`: where some evals are required, the highest level of this one.
    """

    recent: tuple[float, ...] = ()
    stderr: float | None = None
    moves: tuple[float, ...] = ()
    scale: float = 0.0
    factor: float = 0.0
    missed: int = 0
    best_level: float = 0.0

    @property
    def counts(self) -> bool:
        """Whether it has a recent enough value."""
        return bool(self.recent) and self.missed <= CARRIED

    @property
    def level(self) -> float:
        """The median of its last values."""
        return find_median(self.recent) if self.recent else 0.0


class CombinedState(Struct, frozen=True):
    """The state on which the next score depends.

    `pending`: the values of an incomplete step. `last`: the last step that has a score. `unit`: see the
    module. `best`: the highest level of the score, None before the first. `required`: the indexes of required evals.
    """

    evals: tuple[EvalState, ...]
    pending: tuple[EvalValue, ...] = ()
    last: int | None = None
    offset: float = 0.0
    unit: float = 1.0
    best: float | None = None
    eval_version: int = 0
    required: tuple[int, ...] = ()

    @property
    def level(self) -> float:
        """The score computed from the evals' levels."""
        return self.offset + math.fsum(item.factor * item.level for item in self.evals)

    @property
    def falls(self) -> tuple[float, ...]:
        """How much each eval has lowered the score since its best; negative: raised."""
        return tuple(item.factor * (item.best_level - item.level) for item in self.evals)


def start_combining(count: int, required: Iterable[int] = ()) -> CombinedState:
    """The state before the first value of `count` evals; `required`: the indexes of those that all have to fall."""
    return CombinedState((EvalState(),) * count, required=tuple(required))


def combine_values(
    weights: Sequence[float], state: CombinedState, values: Iterable[EvalValue]
) -> tuple[CombinedState, list[Score]]:
    """Add values by ascending step, each (step, place) once; returns the scores of the steps that are now complete.

    Raises OutOfOrder for a value at or before the last scored step, or before the pending step.

    >>> state, scores = combine_values((1.0, 1.0), start_combining(2), [
    ...     EvalValue(step, place, value)
    ...     for step, row in enumerate([(0.1, 20.0), (0.2, 30.0), (0.3, 40.0), (0.1, 40.0), (0.1, 40.0)])
    ...     for place, value in enumerate(row)
    ... ])
    >>> [round(score.value, 9) for score in scores]
    [0.0, 1.0, 2.0, 1.0, 1.0]
    >>> [round(fall, 9) for fall in state.falls]
    [0.5, 0.0]
    """
    scores: list[Score] = []
    for step, group in groupby(values, key=lambda item: item.step):
        if (state.last is not None and step <= state.last) or (state.pending and step < state.pending[0].step):
            raise OutOfOrder
        if state.pending and step > state.pending[0].step:
            state, score = _score_step(weights, state)
            scores.append(score)
        state = replace(state, pending=(*state.pending, *group))
        if len(state.pending) == len(state.evals):
            state, score = _score_step(weights, state)
            scores.append(score)
    return state, scores


def _score_step(weights: Sequence[float], state: CombinedState) -> tuple[CombinedState, Score]:
    """The score of the pending step, and the state after it.

    1. If the measurement changed, discard all earlier values.
    2. Each eval adds its value, or counts it as missing.
    3. If the factors change, change the offset too, so that earlier levels keep their score.
    4. Compute the score, and whether it is the best so far.
    """
    step, version = state.pending[0].step, state.pending[0].eval_version
    if version != state.eval_version:
        state = replace(start_combining(len(state.evals), state.required), pending=state.pending, eval_version=version)
    finite = {item.place: item for item in state.pending if abs(item.value) < _LARGEST}
    evals = [_take_value(item, finite.get(index)) for index, item in enumerate(state.evals)]
    if state.required:
        evals = [_raise_best(before, item) for before, item in zip(state.evals, evals, strict=True)]
    unit = state.unit * _measure_unit_change(weights, state.evals, evals)
    present = math.fsum(weight for weight, item in zip(weights, evals, strict=True) if item.counts)
    offset, moved = state.offset, []
    for weight, before, item in zip(weights, state.evals, evals, strict=True):
        factor = unit * weight / (item.scale * present) if item.counts and item.scale else 0.0
        kept = before if before.recent else item
        offset += (before.factor - factor) * (kept.best_level if state.required else kept.level)
        moved.append(replace(item, factor=factor))
    state = replace(state, evals=tuple(moved), pending=(), last=step, offset=offset, unit=unit, eval_version=version)
    if state.required:
        value, stderr = _subtract_smallest_loss(state)
        return state, Score(step, value if finite else math.nan, stderr, version)
    value = offset + math.fsum(item.factor * item.recent[-1] for item in moved if item.recent) if finite else math.nan
    level = state.level
    if finite and (state.best is None or level > state.best):
        state = replace(state, best=level, evals=tuple(replace(item, best_level=item.level) for item in moved))
    return state, Score(step, value, _combine_stderrs(moved), version)


def _take_value(state: EvalState, item: EvalValue | None) -> EvalState:
    if item is None:
        return replace(state, missed=min(state.missed + 1, CARRIED + 1))
    moves, scale = state.moves, state.scale
    move = abs(item.value - state.recent[-1]) if state.recent else 0.0
    if move > max(_SMALLEST, _ROUNDING * abs(item.value)) and len(moves) < MOVES:
        moves = (*moves, move)
        if len(moves) & (len(moves) - 1) == 0:
            scale = find_median(moves)
    return replace(
        state, recent=(*state.recent, item.value)[-_LEVEL:], stderr=item.stderr, moves=moves, scale=scale, missed=0
    )


def _raise_best(before: EvalState, after: EvalState) -> EvalState:
    """The eval with the highest level that it has had."""
    return replace(after, best_level=max(before.best_level, after.level) if before.recent else after.level)


def _subtract_smallest_loss(state: CombinedState) -> tuple[float, float | None]:
    """The score where some evals are required, and its standard error: that of the eval which lost least."""
    best = state.offset + math.fsum(item.factor * item.best_level for item in state.evals)
    required = [state.evals[index] for index in state.required if state.evals[index].scale]
    losses = [state.unit * (item.best_level - item.recent[-1]) / item.scale for item in required]
    if not losses:
        return best, None
    least, item = min(zip(losses, required, strict=True), key=lambda pair: pair[0])
    return best - least, None if item.stderr is None else state.unit * item.stderr / item.scale


def _measure_unit_change(weights: Sequence[float], before: Sequence[EvalState], after: Sequence[EvalState]) -> float:
    """How many times larger the unit becomes when scales are renewed."""
    ratios = [
        (weight, old.scale / new.scale) for weight, old, new in zip(weights, before, after, strict=True) if old.scale
    ]
    if all(ratio == 1.0 for _, ratio in ratios):
        return 1.0
    return math.fsum(weight for weight, _ in ratios) / math.fsum(weight * ratio for weight, ratio in ratios)


def _combine_stderrs(evals: Sequence[EvalState]) -> float | None:
    """The standard error of the weighted mean, if known for all evals that count."""
    errors = [None if item.stderr is None else item.factor * item.stderr for item in evals if item.factor]
    if not errors or None in errors:
        return None
    return math.sqrt(math.fsum(error * error for error in errors if error is not None))
