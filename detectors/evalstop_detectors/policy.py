"""A policy weighs the evidence of its detectors and comes to a verdict with its reason."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from msgspec import Struct

from evalstop_detectors.detector import Detector, Evidence, Kind, Thresholds
from evalstop_detectors.observation import Signal


class Call(StrEnum):
    """What a verdict calls for."""

    CONTINUE = "continue"
    SUSPECT = "suspect"
    STOP = "stop"


class Finding(Struct, frozen=True):
    """The evidence of one detector beside the thresholds that it was held against."""

    detector: str
    signals: tuple[Signal, ...]
    kind: Kind
    value: float
    suspect_at: float | None
    stop_at: float | None
    turn_step: int | None
    note: str


class Verdict(Struct, frozen=True):
    """`continue`, `suspect` or `stop`, with its reason and the numbers behind it.

    `step` is the step of the observation on which it was reached, None before the first. `turn_step` is where the
    detectors that called for it believe the turn was (the earliest of their beliefs).
    """

    verdict: Call
    step: int | None
    turn_step: int | None
    reason: str
    evidence: tuple[Finding, ...] = ()

    @property
    def stops(self) -> bool:
        return self.verdict is Call.STOP


NOTHING_SEEN = Verdict(Call.CONTINUE, None, None, "nothing observed yet")


class Member(Struct, frozen=True):
    """A detector and the thresholds that this policy holds it to."""

    detector: Detector[Any]
    thresholds: Thresholds

    @property
    def sees_gold(self) -> bool:
        return Signal.EVAL in self.detector.signals


class Policy(Struct, frozen=True):
    """A named composition of detectors.

    `at_least`: how many members must call for a stop (1 is any of them, `len(members)` is all).
    `gold_required`: members that never see the eval signal may raise a suspicion, but not stop a run by themselves.
    `min_evals`: no stop before so many finite evals; `warmup_steps`: none before this step.
    """

    name: str
    members: tuple[Member, ...]
    at_least: int = 1
    gold_required: bool = True
    min_evals: int = 0
    warmup_steps: int = 0
    description: str = ""

    @property
    def signals(self) -> frozenset[Signal]:
        """The signals that any member watches, and gold, of which the policy itself keeps count."""
        return frozenset({Signal.EVAL}).union(*(member.detector.signals for member in self.members))

    def judge(self, evidence: Sequence[Evidence | None], step: int, evals: int) -> Verdict:
        """The verdict on one evidence a member (None: that member has seen nothing), after `evals` finite evals."""
        seen = [(member, item) for member, item in zip(self.members, evidence, strict=True) if item is not None]
        findings = tuple(_finding(member, item) for member, item in seen)
        stopping = [(m, e) for m, e in seen if e.reaches(m.thresholds.stop_at)]
        alarmed = [(m, e) for m, e in seen if e.reaches(m.thresholds.stop_at) or e.reaches(m.thresholds.suspect_at)]
        held_back = self._held_back(stopping, step, evals)
        if stopping and held_back is None:
            return Verdict(Call.STOP, step, _turn(stopping), _words(stopping), findings)
        if alarmed:
            reason = _words(alarmed) + (f"; no stop: {held_back}" if stopping and held_back else "")
            return Verdict(Call.SUSPECT, step, _turn(alarmed), reason, findings)
        return Verdict(Call.CONTINUE, step, None, "no detector calls for a stop", findings)

    def _held_back(self, stopping: Sequence[tuple[Member, Evidence]], step: int, evals: int) -> str | None:
        if len(stopping) < self.at_least:
            return f"{len(stopping)} of the {self.at_least} detectors needed call for one"
        if self.gold_required and not any(member.sees_gold for member, _ in stopping):
            return "there is no evidence from the eval score"
        if evals < self.min_evals:
            return f"{evals} of the {self.min_evals} evals needed were seen"
        if step < self.warmup_steps:
            return f"the run is in its first {self.warmup_steps} steps"
        return None


def _finding(member: Member, evidence: Evidence) -> Finding:
    return Finding(
        detector=member.detector.name,
        signals=tuple(sorted(member.detector.signals)),
        kind=evidence.kind,
        value=evidence.value,
        suspect_at=member.thresholds.suspect_at,
        stop_at=member.thresholds.stop_at,
        turn_step=evidence.turn_step,
        note=evidence.note,
    )


def _turn(alarmed: Sequence[tuple[Member, Evidence]]) -> int | None:
    return min((e.turn_step for _, e in alarmed if e.turn_step is not None), default=None)


def _words(alarmed: Sequence[tuple[Member, Evidence]]) -> str:
    return "; ".join(f"{member.detector.name}: {evidence.note}" for member, evidence in alarmed)
