"""What a run has, as rows, responses and events hold it: verdict, best checkpoint, turn, outcome, the origin of its
metric roles, changes of its eval, and its description. Pure.

The store and the webhooks know these structs but no detectors. What a later release wrote before a rollback stays
readable: kinds of evidence and roles are plain text here.

From the first step of a change of the eval on, levels are compared only with each other. Changes are stored by
ascending step, one for each step, the first that was reported.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from datetime import datetime
from enum import StrEnum
from functools import lru_cache
from typing import Annotated, Literal, NotRequired, TypedDict
from uuid import UUID

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace
from pydantic import Field

from evalstop_service.domain.fields import Body, Name, Plain, doc
from evalstop_service.domain.statuses import DecisionOutcome, RunOutcome


class Call(StrEnum):
    """What a verdict calls for."""

    CONTINUE = "continue"
    SUSPECT = "suspect"
    STOP = "stop"


class Evidence(Struct, frozen=True, cache_hash=True):
    """A detector's reading and its thresholds."""

    detector: Annotated[str, doc("the name of the detector")]
    roles: Annotated[tuple[str, ...], doc("the roles of the metrics that it uses")]
    kind: Annotated[str, Meta(description="the kind of value: a count, a statistic, ...")]
    value: Annotated[float, doc("the number, in the unit of `kind`")]
    suspect_at: Annotated[float | None, doc("the value from which the verdict is `suspect`; null: never")]
    stop_at: Annotated[float | None, doc("the value from which the verdict is `stop`; null: never")]
    turn_step: Annotated[int | None, doc("the estimated step of the turn; null: no estimate")]
    note: Annotated[str, doc("the evidence, for people")]


class Verdict(Struct, frozen=True):
    """The policy's verdict on the run so far."""

    verdict: Annotated[Call, doc("what to do with the run")]
    step: Annotated[int | None, doc("the step of the observation that led to it; null: none yet")]
    turn_step: Annotated[int | None, doc("the detectors' estimate of the step of the turn")]
    reason: Annotated[str, doc("the reason, for people")]
    evidence: Annotated[tuple[Evidence, ...], doc("the evidence of each detector")] = ()
    critical: Annotated[str | None, doc("the critical eval that caused it; null: the watched score")] = None

    @property
    def stops(self) -> bool:
        """Whether it calls for a stop."""
        return self.verdict is Call.STOP

    @property
    def reason_in_words(self) -> str:
        """The reason without the names of detectors, for messages to people."""
        words = self.reason
        for item in self.evidence:
            words = words.replace(f"{item.detector}: {item.note}", item.note) if item.note else words
        return words

    @property
    def for_json(self) -> Verdict:
        """The verdict for JSON encoding, with its evidence as already encoded text.

        Evidence is most of a verdict's text, and between two evals only the step changes.
        """
        return msgspec.structs.replace(self, evidence=_encode_evidence(self.evidence))


@lru_cache(maxsize=2_000)
def _encode_evidence(evidence: tuple[Evidence, ...]) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(evidence))


class FirstCall(Struct, frozen=True):
    """When a member of the run's policy first called for a stop: the step, and when its observation was taken in."""

    step: int
    at: datetime


class JudgedCall(Struct, frozen=True):
    """The first call of a detector in an attempt that has ended, and whether a stop at it would have been right."""

    step: Annotated[int, doc("the step at which it first called for a stop")]
    outcome: Annotated[DecisionOutcome, doc("whether a stop at this step would have been right")]
    delay_steps: Annotated[int | None, doc("from the turn to a right call; null: not right, or the turn is unknown")]
    gpu_hours_after: Annotated[float | None, doc("GPU-hours of the attempt after the call; null: unknown")]


class DetectorCall(Struct, frozen=True):
    """What one detector of the run's policy makes of the run: its evidence now, and its first call for a stop."""

    detector: Annotated[str, doc("its name in the policy")]
    observes: Annotated[bool, doc("true: it is only measured; false: it has a say in the verdict")]
    kind: Annotated[str, doc("the kind of its evidence: a count, a statistic, ...")]
    threshold: Annotated[float | None, doc("the evidence from which it calls for a stop; null: never")]
    evidence: Annotated[float | None, doc("its evidence now; null: none yet, or the observations were deleted")]
    note: Annotated[str, doc("that evidence, for people")]
    turn_step: Annotated[int | None, doc("its estimate of the step of the turn; null: no estimate")]
    step: Annotated[int | None, doc("the step at which it first called for a stop; null: it has not")]
    called_at: Annotated[datetime | None, doc("when the observation of that step was taken in; null: no call")]


class BestCheckpoint(Struct, frozen=True):
    """The checkpoint to ship."""

    step: Annotated[int, doc("the training step that it holds")]
    uri: Annotated[str, doc("the URI that the trainer reported")]
    score: Annotated[float, doc("the score measured at this step")]
    chosen_by: Annotated[str, doc("the rule that chose it, such as smoothed_maximum or raw_maximum")]
    smoothed: Annotated[float | None, doc("the score smoothed over neighboring evals")] = None
    smoothed_stderr: Annotated[float | None, doc("standard error of `smoothed`")] = None


class RawMaximum(Struct, frozen=True):
    """The highest measured eval, with or without a checkpoint."""

    step: Annotated[int, doc("the training step of the highest eval")]
    score: Annotated[float, doc("the highest eval, as measured")]


class EvalSegment(Struct, frozen=True):
    """A stretch of the eval in hindsight, between two borders of the line fitted to it."""

    kind: Annotated[Literal["rise", "plateau", "fall"], doc("rise: the eval got better; fall: it got worse")]
    first_step: Annotated[int, doc("the step of the border where it begins")]
    last_step: Annotated[int, doc("the step of the border where it ends")]
    low_step: Annotated[int, doc("the first step at which it may begin, by a 95 % interval")]
    high_step: Annotated[int, doc("the last such step")]
    first_score: Annotated[float, doc("the line where it begins, in the unit of the metric")]
    last_score: Annotated[float, doc("the line where it ends")]


class Turn(Struct, frozen=True):
    """Where a run turned: a stop from its step on is right, one before `low_step` is wrong."""

    step: Annotated[int, doc("the last eval before the lasting fall")]
    low_step: Annotated[int, doc("the first step of the range of the peak")]


class ChangePoint(Turn, frozen=True):
    """Where the eval turned, by all evals of an ended run."""

    high_step: Annotated[int, doc("the last step of the range")]


class RunAssessment(Struct, frozen=True):
    """The outcome of a run with its reason."""

    run_outcome: Annotated[RunOutcome, doc("turned: the eval fell for good; healthy: it did not; undecided: unknown")]
    reason: Annotated[str, doc("the rule that applied, with its numbers")]
    turn: Annotated[Turn | None, doc("where it turned, by its best evals; null: it did not")] = None
    judged_from: Annotated[int | None, doc("the first step of the evals at its end; null: too few evals")] = None


RoleOrigin = Literal["declared", "recognized", "guessed"]
"""The values of `evalstop_detectors.RoleOrigin`; the store does not import detectors."""

COMBINED_METRIC = "evalstop/score"
"""The series that combines several evals of a run: their standardized weighted mean, higher is better."""


class MetricFields(TypedDict):
    """A metric with a role: the role, and the direction. One of several evals also has its weight, by default 1,
    whether a lasting fall of it alone counts as a fall of the run, and whether the run only falls if it does."""

    role: str
    direction: str
    weight: NotRequired[float]
    critical: NotRequired[bool]
    required: NotRequired[bool]


class Recognition(Struct, frozen=True):
    """Where the roles of a run's metrics come from. No run is stopped on a guess."""

    open: Annotated[bool, doc("true: new metrics can still change the roles")]
    preset: Annotated[str | None, doc("the known trainer whose metric names match")] = None
    sources: Annotated[
        dict[str, str], doc("by metric: trainer, default, preset NAME, names (a common name), person")
    ] = {}
    origins: Annotated[
        dict[str, RoleOrigin],
        doc(
            "by metric: declared, recognized (a known trainer's name), guessed: a guess never stops the run;"
            " confirm it by PATCH /runs/{run_id}/metrics"
        ),
    ] = {}
    reasons: Annotated[dict[str, str], doc("by metric: why it has this role, or none")] = {}
    warnings: Annotated[list[str], doc("what may be wrong with the roles, for people")] = []

    @property
    def guessed(self) -> list[str]:
        """The metrics whose role or direction is a guess, by name."""
        return sorted(metric for metric, origin in self.origins.items() if origin == "guessed")


MOST_CHANGES = 100


class EvalChange(Struct, frozen=True):
    """From `step` on the eval is measured differently. `version`: the trainer's name for it, if any."""

    step: Annotated[int, doc("the first step measured differently")]
    reason: Annotated[str, doc("what changed")]
    actor: Annotated[str, doc("who reported it")]
    at: Annotated[datetime, doc("when it was reported")]
    version: Annotated[str | None, doc("the eval version from there on; null: not reported")] = None


def find_version(changes: Sequence[EvalChange], step: int) -> int:
    """How many times the measurement had changed by this step."""
    return bisect_right(changes, step, key=lambda change: change.step) if changes else 0


def add_change(changes: Sequence[EvalChange], change: EvalChange) -> tuple[EvalChange, ...]:
    """The changes with another one, unless they already have one at its step."""
    if any(earlier.step == change.step for earlier in changes):
        return tuple(changes)
    return tuple(sorted((*changes, change), key=lambda item: item.step))


def carry_into_attempt(changes: Sequence[EvalChange], resumed_at: int) -> tuple[EvalChange, ...]:
    """The changes for a run resumed after this step. The measurement in force at the end applies from there on."""
    earlier = tuple(change for change in changes if change.step <= resumed_at)
    later = changes[len(earlier) :]
    return (*earlier, replace(later[-1], step=resumed_at + 1)) if later else earlier


MOST_TAGS = 50
LONGEST_TAG = 100
LONGEST_NOTES = 20_000
MOST_STEP_NOTES = 100
LONGEST_STEP_NOTE = 256

Tag = Annotated[Name, Field(max_length=LONGEST_TAG)]


class StepNote(Struct, frozen=True):
    """A note of a person at a step of a run; the run's chart shows it there."""

    id: Annotated[UUID, doc("id of the note")]
    step: Annotated[int, doc("the training step that it is about")]
    text: Annotated[str, doc("what the chart shows")]
    author: Annotated[str, doc("who wrote it")]
    at: Annotated[datetime, doc("when it was written")]


class RunDescription(msgspec.Struct, frozen=True):
    """The stored description."""

    owner: Annotated[str | None, doc("who is notified; null: nobody")] = None
    group: Annotated[str | None, doc("group of runs that it is compared with; null: none")] = None
    tags: Annotated[tuple[str, ...], doc("tags to find it by")] = ()
    notes: Annotated[str, doc("notes by people")] = ""
    step_notes: Annotated[tuple[StepNote, ...], doc("notes by people at steps of the run, by ascending step")] = ()


NOTHING_SAID = RunDescription()


class DescriptionIn(Body):
    """A change of a description. An omitted field stays as it is; null clears it."""

    owner: Name | None = Field(
        None, description="who is notified: an e-mail address, or any name", examples=["dana@example.org"]
    )
    group: Name | None = Field(
        None, description="what it is compared with: a sweep, or the seeds of one configuration", examples=["ppo-7b"]
    )
    tags: Annotated[list[Tag], Field(max_length=MOST_TAGS)] | None = Field(
        None, description="short words to find it by", examples=[["baseline"]]
    )
    notes: Annotated[str, Field(max_length=LONGEST_NOTES), Plain] | None = Field(
        None, description="text for people, of any number of lines", examples=["the grader was down from 14:00 on"]
    )

    def change(self, before: RunDescription) -> RunDescription:
        """The description after this change."""
        changed = {name: getattr(self, name) for name in DescriptionIn.model_fields if name in self.model_fields_set}
        if "tags" in changed:
            changed["tags"] = tuple(dict.fromkeys(changed["tags"] or ()))
        if "notes" in changed:
            changed["notes"] = changed["notes"] or ""
        return msgspec.structs.replace(before, **changed)
