"""The evidence of each detector over a run, recomputed by replaying its observations. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from evalstop_detectors import Evidence, Observation, Policy, advance, start

from evalstop_service.rules.run_results import Verdict
from evalstop_service.store.observations import PostedObservation


@dataclass
class Track:
    """One member of the policy: its detector, the kind of its evidence, its thresholds (None: never), and its value at
    each step."""

    member: str
    detector: str
    kind: str
    suspect_at: float | None
    stop_at: float | None
    points: list[PostedObservation] = field(default_factory=list)

    def add_value(self, step: int, value: float) -> None:
        """Record the value from this step on; the last one at a step counts."""
        if self.points and self.points[-1].step == step:
            self.points.pop()
        self.points.append(PostedObservation(self.member, step, value))

    @property
    def has_evidence(self) -> bool:
        """Whether any value differs from 0."""
        return any(point.value != 0 for point in self.points)


def replay_evidence(policy: Policy, observations: Iterable[Observation]) -> list[Track]:
    """The evidence after every observation, given in step order."""
    tracks: list[Track | None] = [None] * len(policy.members)
    state = start(policy)
    previous: Sequence[Evidence | None] = state.evidence
    for item in observations:
        state, _ = advance(policy, state, (item,))
        for index, evidence in enumerate(state.evidence):
            if evidence is None or evidence is previous[index]:
                continue
            thresholds = policy.members[index].thresholds
            track = tracks[index]
            if track is None:
                detector = policy.members[index].detector.name
                tracks[index] = track = Track(
                    policy.ids[index], detector, evidence.kind, thresholds.suspect_at, thresholds.stop_at
                )
            track.add_value(item.step, evidence.value)
        previous = state.evidence
    return [track for track in tracks if track is not None]


def read_evidence(verdicts: Iterable[Verdict]) -> list[Track]:
    """The evidence stored with the changes of a verdict, oldest first, for a run that is too long to replay."""
    tracks: dict[int, Track] = {}
    for verdict in verdicts:
        for index, item in enumerate(verdict.evidence):
            if verdict.step is None:
                continue
            track = tracks.get(index)
            if track is None:
                tracks[index] = track = Track(item.detector, item.detector, item.kind, item.suspect_at, item.stop_at)
            track.add_value(verdict.step, item.value)
    return list(tracks.values())
