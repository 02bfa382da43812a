"""The first evals of a run: a fall among them may be its warm-up, or follow a lucky second eval.

The opening lasts six evals where the second is no better than the first, else up to 16, while the second is the best.
It holds those evals and is empty once it is over. Both lengths were chosen on drawn runs, where they cost no turn.
"""

from __future__ import annotations

_AFTER_FALL, _AFTER_RISE = 6, 16

Opening = tuple[float, ...]


def add_eval(opening: Opening, evals: int, value: float) -> Opening:
    """The opening after one more finite eval of a run that had so many."""
    if len(opening) < evals:
        return ()
    longer = (*opening, value)
    if len(longer) < 2:
        return longer
    if longer[1] <= longer[0]:
        return longer if len(longer) < _AFTER_FALL else ()
    return longer if len(longer) < _AFTER_RISE and max(longer) == longer[1] else ()


def explain_wait(opening: Opening) -> str | None:
    """Why a run that opened so is not to be stopped yet; None: nothing speaks against it."""
    if len(opening) < 2:
        return None
    if opening[1] <= opening[0]:
        return f"the score fell from its first eval on, as in a warm-up; that is judged from eval {_AFTER_FALL} on"
    if len(opening) < 3 or sorted(opening[-3:])[1] <= 0.5 * opening[0] + 0.5 * opening[1]:
        return None
    return f"the second eval is the best, and most of its rise is left; that is judged from eval {_AFTER_RISE} on"
