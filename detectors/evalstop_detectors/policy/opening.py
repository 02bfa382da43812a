"""The first evals of a run: a fall among them may be its warm-up, or follow a lucky second eval.

The opening lasts six evals where the second is no better than the first, else up to 16, while the second is the best.
Both lengths were chosen on drawn runs, where they cost no turn. While the learning rate still rises, it lasts until an
eval is better than the first two: before that nothing was reached that could be lost.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import compress, repeat
from operator import itemgetter

from msgspec import Struct

from evalstop_detectors.observation import NO_VALUES, RANK, Columns, MetricRole, Order

_AFTER_FALL, _AFTER_RISE = 6, 16


class Opening(Struct, frozen=True, forbid_unknown_fields=True):
    """`scores`: the first finite evals, none once the opening is over; of a long warm-up the first two and the latest.
    `rates`: the last two learning rates, up to the first that is not higher than the one before it."""

    scores: tuple[float, ...] = ()
    rates: tuple[float, ...] = ()

    @property
    def is_warm_up(self) -> bool:
        """Whether the learning rate still rises, and no eval was better than the first two."""
        rises = len(self.rates) == 2 and not self.has_peaked
        return rises and len(self.scores) > 1 and max(self.scores[:2]) == max(self.scores)

    @property
    def has_peaked(self) -> bool:
        """Whether the learning rate once did not rise: from there on it changes nothing."""
        return len(self.rates) == 2 and self.rates[1] <= self.rates[0]

    def add_rate(self, rate: float) -> Opening:
        """The opening after one more learning rate; itself if that changes nothing."""
        if self.has_peaked or not math.isfinite(rate):
            return self
        return Opening(self.scores, (*self.rates[-1:], rate))

    def add_eval(self, evals: int, value: float) -> Opening:
        """The opening after one more finite eval of a run that had so many."""
        if evals and not self.scores:
            return self
        longer = Opening((*self.scores[:2], *(*self.scores[2:], value)[2 - _AFTER_RISE :]), self.rates)
        return longer if len(longer.scores) < 2 or longer.is_warm_up or longer._is_short() else Opening((), self.rates)

    def _is_short(self) -> bool:
        if self.scores[1] <= self.scores[0]:
            return len(self.scores) < _AFTER_FALL
        return len(self.scores) < _AFTER_RISE and max(self.scores) == self.scores[1]

    def explain_wait(self) -> str | None:
        """Why a run that opened so is not to be stopped yet; None: nothing speaks against it."""
        if self.is_warm_up:
            return "the learning rate still rises, and no eval was better than the first two: a warm-up"
        if len(self.scores) < 2 or not self._is_short():
            return None
        first, second = self.scores[:2]
        if second <= first:
            return f"the score fell from its first eval on, as in a warm-up; that is judged from eval {_AFTER_FALL} on"
        if len(self.scores) < 3 or sorted(self.scores[-3:])[1] <= 0.5 * first + 0.5 * second:
            return None
        return f"the second eval is the best, and most of its rise is left; that is judged from eval {_AFTER_RISE} on"


NO_EVALS = Opening()


class Openings:
    """The opening of a run, and what it is at each observation of these columns."""

    def __init__(self, opening: Opening, evals: int, columns: Columns) -> None:
        """`evals`: how many finite ones the run had before these columns."""
        self.last, self.last_rate = opening, None
        self._orders, self._openings = list[Order](), [opening]
        pairs = [_list_finite(columns, role) for role in (MetricRole.LEARNING_RATE, MetricRole.EVAL)]
        for order, value in heapq.merge(*pairs):
            before, is_eval = self.last, order[1] == RANK[MetricRole.EVAL]
            self.last = before.add_eval(evals, value) if is_eval else before.add_rate(value)
            evals += is_eval
            if self.last is not before:
                self._orders.append(order)
                self._openings.append(self.last)
                self.last_rate = self.last_rate if is_eval else order
            if evals and not self.last.scores and (MetricRole.LEARNING_RATE not in columns or self.last.has_peaked):
                break

    def before(self, order: Order) -> Opening:
        return self._openings[bisect_left(self._orders, order)]

    def at(self, order: Order) -> Opening:
        return self._openings[bisect_right(self._orders, order)]


def _list_finite(columns: Columns, role: MetricRole) -> Iterator[tuple[Order, float]]:
    column = columns.get(role, NO_VALUES)
    pairs = zip(zip(column.steps, repeat(RANK[role]), strict=False), column.values, strict=True)
    return compress(pairs, map(math.isfinite, column.values))


def list_finite_evals(columns: Columns) -> list[Order]:
    return list(map(itemgetter(0), _list_finite(columns, MetricRole.EVAL)))
