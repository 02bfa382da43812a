"""Which points of a batch are new: an identity (run, metric, step) counts once, and its first value stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from evalstop_service.ingest.messages import Contradiction
from evalstop_service.ingest.run_cache import LiveRun
from evalstop_service.ingest.unit_of_work import Work
from evalstop_service.store import observations
from evalstop_service.store.observations import Point


@dataclass(frozen=True, slots=True)
class Sorted:
    """Points that are new, of which the last `late` are not past the last step of their metric, and contradictions.

    `last_steps`: those of the run's metrics once the new points are stored.
    """

    fresh: list[Point]
    last_steps: dict[str, int]
    late: int = 0
    contradictions: tuple[Contradiction, ...] = ()


def sort_out(work: Work, live: LiveRun, points: Sequence[Point]) -> Sorted:
    """The new points among these, and those that contradict what is on record; the others repeat it."""
    last_steps = live.last_steps.copy()
    fresh: list[Point] = []
    doubtful: list[Point] = []
    for point in points:
        if point.step > last_steps.get(point.metric, -1):  # past all that is on record: nothing to look up
            last_steps[point.metric] = point.step
            fresh.append(point)
        else:
            doubtful.append(point)
    if not doubtful:
        return Sorted(fresh, last_steps)
    work.needs_transaction()
    work.write()
    known = observations.load_live_values(work.tx, live.run.id, {point.identity for point in doubtful})
    known |= {point.identity: point.value for point in fresh}
    past_all, contradictions = len(fresh), list[Contradiction]()
    for point in doubtful:
        if point.identity not in known:
            known[point.identity] = point.value
            fresh.append(point)
        elif not _same(known[point.identity], point.value):
            contradictions.append(Contradiction(point, known[point.identity]))
    return Sorted(fresh, last_steps, len(fresh) - past_all, tuple(contradictions))


def _same(stored: float, sent: float) -> bool:
    return stored == sent or (stored != stored and sent != sent)  # NaN repeats NaN
