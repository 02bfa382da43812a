"""The first evals of a run: a fall among them may be its warm-up, or follow a lucky second eval.

The opening lasts six evals where the second is no better than the first, else up to 16, while the second is the best.
Both lengths were chosen on drawn runs, where they cost no turn. While the learning rate still rises, it lasts until an
eval is better than the first two: before that nothing was reached that could be lost.
"""

from __future__ import annotations

import math

from msgspec import Struct

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
