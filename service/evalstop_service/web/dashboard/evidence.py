"""The evidence of each detector over a run, recomputed by replaying its observations. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from evalstop_detectors import Evidence, MetricRole, MonitorState, Observation, Policy, advance, start
from evalstop_detectors.detectors.posterior import Posterior

from evalstop_service.domain.run import Verdict
from evalstop_service.store.observations import PostedObservation


@dataclass(frozen=True)
class Covered:
    """The share of its final range of scores that a run has covered at a step: 10, 50 and 90 % quantile."""

    step: int
    low: float
    middle: float
    high: float


@dataclass
class Track:
    """One member of the policy: its detector, the kind of its evidence, its thresholds (None: never), and its value at
    each step. `covered`: at each eval, from a detector that expects how much is still to be gained."""

    member: str
    detector: str
    kind: str
    suspect_at: float | None
    stop_at: float | None
    points: list[PostedObservation] = field(default_factory=list)
    covered: list[Covered] = field(default_factory=list)

    def add_value(self, step: int, value: float) -> None:
        """Record the value from this step on; the last one at a step counts."""
        if self.points and self.points[-1].step == step:
            self.points.pop()
        self.points.append(PostedObservation(self.member, step, value))

    @property
    def has_evidence(self) -> bool:
        """Whether any value differs from 0, or the run's covered share is known."""
        return bool(self.covered) or any(point.value != 0 for point in self.points)


def replay_evidence(policy: Policy, observations: Iterable[Observation]) -> list[Track]:
    """The evidence after every observation, given in step order."""
    tracks: list[Track | None] = [None] * len(policy.members)
    state = start(policy)
    previous: Sequence[Evidence | None] = state.evidence
    for item in observations:
        state, _ = advance(policy, state, (item,))
        for index, evidence in enumerate(state.evidence):
            if evidence is None:
                continue
            track = tracks[index]
            if track is None:
                member = policy.members[index]
                limits = member.thresholds
                tracks[index] = track = Track(
                    policy.ids[index], member.detector.name, evidence.kind, limits.suspect_at, limits.stop_at
                )
            if evidence is not previous[index]:
                track.add_value(item.step, evidence.value)
            if item.role is MetricRole.EVAL and evidence.outlook is not None:
                track.covered += _read_covered(policy, state, index, item.step)
        previous = state.evidence
    return [track for track in tracks if track is not None]


def _read_covered(policy: Policy, state: MonitorState, index: int, step: int) -> list[Covered]:
    """A member's estimate of the share that the run has covered; empty if its detector has none."""
    detector = policy.members[index].detector
    if not isinstance(detector, Posterior):
        return []
    low, middle, high = detector.outlook(state.states[index]).to_gain
    return [Covered(step, 1 / (1 + high), 1 / (1 + middle), 1 / (1 + low))]


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
