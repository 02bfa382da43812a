"""Which points of a batch are new: an identity (run, metric, step) counts once, and its first value stands."""

from __future__ import annotations

from collections.abc import Sequence

from evalstop_service.ingest.live import LiveRun
from evalstop_service.ingest.news import Contradiction
from evalstop_service.ingest.work import Work
from evalstop_service.store import observations
from evalstop_service.store.observations import Point


def sort_out(work: Work, live: LiveRun, points: Sequence[Point]) -> tuple[list[Point], tuple[Contradiction, ...]]:
    """The new points among these, and those that contradict what is on record; the others repeat it."""
    last_steps = live.last_steps
    fresh: list[Point] = []
    doubtful: list[Point] = []
    for point in points:
        if point.step > last_steps.get(point.metric, -1):  # past all that is on record: nothing to look up
            last_steps[point.metric] = point.step
            fresh.append(point)
        else:
            doubtful.append(point)
    if not doubtful:
        return fresh, ()
    work.write()
    known = observations.live_values(work.tx, live.run.id, {point.identity for point in doubtful})
    known |= {point.identity: point.value for point in fresh}
    contradictions: list[Contradiction] = []
    for point in doubtful:
        if point.identity not in known:
            known[point.identity] = point.value
            fresh.append(point)
        elif not _same(known[point.identity], point.value):
            contradictions.append(Contradiction(point, known[point.identity]))
    return fresh, tuple(contradictions)


def _same(stored: float, sent: float) -> bool:
    return stored == sent or (stored != stored and sent != sent)  # NaN repeats NaN
