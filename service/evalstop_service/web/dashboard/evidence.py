"""The evidence of each detector over a run, got by replaying it: the very steps taken when it came in. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from evalstop_detectors import Evidence, Observation, Policy, advance, start

from evalstop_service.store.observations import Point
from evalstop_service.web.dashboard.downsampling import thin

MOST_PLACES = 500


@dataclass
class Track:
    """One member of the policy: what its evidence means, its thresholds (None: never), and its value at each step."""

    member: str
    kind: str
    suspect_at: float | None
    stop_at: float | None
    points: list[Point] = field(default_factory=list)

    def note(self, step: int, value: float) -> None:
        """The value from this step on; of several at one step the last."""
        if self.points and self.points[-1].step == step:
            self.points.pop()
        self.points.append(Point(self.member, step, value))

    @property
    def moves(self) -> bool:
        """Whether it ever showed anything but nothing."""
        return any(point.value != 0 for point in self.points)


def replayed(policy: Policy, observations: Iterable[Observation]) -> list[Track]:
    """The evidence after every observation, given in their order."""
    tracks: list[Track | None] = [None] * len(policy.members)
    state = start(policy)
    known: Sequence[Evidence | None] = state.evidence
    for item in observations:
        state, _ = advance(policy, state, (item,))
        for index, found in enumerate(state.evidence):
            if found is None or found is known[index]:
                continue
            thresholds = policy.members[index].thresholds
            track = tracks[index]
            if track is None:
                tracks[index] = track = Track(policy.ids[index], found.kind, thresholds.suspect_at, thresholds.stop_at)
            track.note(item.step, found.value)
        known = state.evidence
    return [track for track in tracks if track is not None]


def told(changes: Iterable[dict[str, Any]]) -> list[Track]:
    """The evidence as the changes of a verdict, oldest first, have kept it: of a run too long to be replayed."""
    tracks: dict[int, Track] = {}
    for document in changes:
        for index, finding in enumerate(document["evidence"]):
            if document["step"] is None:
                continue
            track = tracks.get(index)
            if track is None:
                tracks[index] = track = Track(
                    finding["detector"], finding["kind"], finding["suspect_at"], finding["stop_at"]
                )
            track.note(document["step"], finding["value"])
    return list(tracks.values())


def thinned(track: Track) -> list[Point]:
    """Its points, few enough to be drawn."""
    return thin(track.points, MOST_PLACES)
