"""Types and models that several resources of the API share."""

from __future__ import annotations

import math
import re
import sys
from datetime import datetime
from typing import Annotated, Any, Generic, Literal, TypeVar
from uuid import UUID

from evalstop_detectors import Kind
from fastapi import Path, Query
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    WithJsonSchema,
    create_model,
)

from evalstop_service.clock import in_utc, rfc3339
from evalstop_service.domain.decision_lifecycle import Action, DecisionState, GuardKind
from evalstop_service.domain.fields import Body, Integral, Line, Name, Outcome
from evalstop_service.domain.project_settings import list_settings
from evalstop_service.domain.run_results import Call
from evalstop_service.projects.project_settings import QuotasIn

MAX_STEP = 2**53 - 1
"""The largest integer that every JSON parser represents exactly."""

_MOST = sys.float_info.max
_TIME = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d", re.ASCII)


def _parse_number(value: Any) -> Any:
    if isinstance(value, str) and value in ("NaN", "Infinity", "-Infinity"):
        return float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -_MOST <= value <= _MOST:
        raise ValueError('a number in the range of a double, or one of the strings "NaN", "Infinity", "-Infinity"')
    return value


def _check_time(moment: Any) -> Any:
    if isinstance(moment, datetime) or (isinstance(moment, str) and _TIME.match(moment)):
        return moment
    raise ValueError("a time as in 2026-01-01T00:00:00Z")


def encode_number(value: float) -> float | str:
    """A number for JSON, which has no NaN and no infinities."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return value


Step = Annotated[int, Field(ge=0, le=MAX_STEP), Integral]
Time = Annotated[
    datetime,
    Field(strict=False),
    BeforeValidator(_check_time),
    AfterValidator(in_utc),
    PlainSerializer(rfc3339, return_type=str),
]
_NUMBER = {"anyOf": [{"type": "number"}, {"type": "string", "enum": ["NaN", "Infinity", "-Infinity"]}]}
Measured = Annotated[float, BeforeValidator(_parse_number), WithJsonSchema(_NUMBER)]
"""A number in a request."""
Stored = Annotated[float, PlainSerializer(encode_number), WithJsonSchema(_NUMBER)]
"""A number in a response."""
RunId = Annotated[UUID, Path(description="`id` of the run, as returned when it was opened or listed")]
DecisionId = Annotated[UUID, Path(description="`id` of the decision, as listed or sent in an event")]
EndpointId = Annotated[UUID, Path(description="`id` of the endpoint, as returned when it was created or listed")]
DeliveryId = Annotated[UUID, Path(description="`id` of the delivery, as listed")]
Cursor = Annotated[UUID | None, Query(description="`next_cursor` of the previous page; default: the first page")]
Limit = Annotated[int, Query(ge=1, le=200, description="maximum number of items per page")]
Scope = Literal["ingest", "read", "report", "operate", "admin"]


T = TypeVar("T")


class Answer(BaseModel):
    """A response, built from the attributes of an object."""

    model_config = ConfigDict(from_attributes=True)


class FindingOut(Answer):
    """The evidence of one detector, and its thresholds."""

    detector: str = Field(description="the name of the detector")
    roles: list[str] = Field(description="the roles of the metrics that it uses")
    kind: str = Field(description=f"what the number means: {', '.join(Kind)}")
    value: float = Field(description="the number, in the unit of `kind`")
    suspect_at: float | None = Field(description="the value from which the verdict is `suspect`; null: never")
    stop_at: float | None = Field(description="the value from which the verdict is `stop`; null: never")
    turn_step: int | None = Field(description="the estimated step of the turn; null: no estimate")
    note: str = Field(description="the evidence, for people")


class VerdictOut(Answer):
    """`continue`, `suspect` or `stop`, with its reason and the numbers behind it."""

    verdict: Call = Field(description="what to do with the run")
    step: int | None = Field(description="the step of the observation that led to it; null: none yet")
    turn_step: int | None = Field(description="the detectors' estimate of the step of the turn")
    reason: str = Field(description="the reason, for people")
    evidence: list[FindingOut] = Field(description="the evidence of each detector")
    ground: str | None = Field(None, description="why the verdict is `stop`: turned or levelled_off; null: it is not")
    critical: str | None = Field(None, description="the critical eval that caused it; null: the watched score")


class DecisionStateOut(Answer):
    """The state of the decision to stop a run."""

    id: UUID = Field(description="id of the decision")
    action: Action = Field(description="stop the job, or park it so that it can resume")
    state: DecisionState = Field(description="its state in the life cycle")
    state_reason: str = Field(description="why it is in this state; for a stop on hold, the guards' reasons")
    guard_kinds: list[GuardKind] = Field(description="the guards that hold it")


class BestCheckpointOut(Answer):
    """The checkpoint to ship."""

    step: int = Field(description="the training step that it holds")
    uri: str = Field(description="the URI that the trainer reported")
    score: float = Field(description="the score measured at this step")
    chosen_by: str = Field(description="the rule that chose it, such as smoothed_maximum or raw_maximum")
    smoothed: float | None = Field(None, description="the score smoothed over neighboring evals")
    smoothed_stderr: float | None = Field(None, description="standard error of `smoothed`")


class RawMaximumOut(Answer):
    """The highest measured eval, with or without a checkpoint."""

    step: int = Field(description="the training step of the highest eval")
    score: float = Field(description="the highest eval, as measured")


class TurnOut(Answer):
    """The change point in hindsight: where the eval turned, from all evals of an ended run."""

    step: int = Field(description="the last eval before the lasting fall")
    low_step: int = Field(description="the first step of the range of the peak")
    high_step: int = Field(description="the last step of the range")
    gain: float = Field(description="from the first eval to the peak, in the unit of the metric")
    drop: float = Field(description="from the peak to the last eval")


class PolicyName(Answer):
    """A version of a policy."""

    name: str = Field(description="the name of the policy")
    version: int = Field(description="version, counted from 1")


class ActionIn(Body):
    """An action of a person, with its reason."""

    actor: Name | None = Field(None, description="default: the name of the key", examples=["dana"])
    reason: Line = Field(
        description="why; recorded in the history and in the audit log",
        examples=["the eval set was broken this morning"],
    )


class OutcomeIn(Body):
    """Whether stopping a run, or letting it run, was right."""

    outcome: Outcome = Field(
        description="for a decision: right if the run had turned; for a run without one: right if it had not"
    )
    turn_step: Step | None = Field(None, description="the step where the eval turned, if known")
    actor: Name | None = Field(None, description="default: the name of the key")
    note: Line = Field("", description="for people")


class QuotasOut(QuotasIn):
    """The limits of the project; only administrators of the installation can change them."""

    model_config = ConfigDict(from_attributes=True)


_FIELDS: dict[str, Any] = {
    declared.name: (declared.bare, Field(description=declared.description)) for declared in list_settings()
}
_Settings: Any = create_model("_Settings", __base__=Answer, **_FIELDS)


class ProjectOut(_Settings):  # more of its fields are those of ProjectSettings
    """A project with its settings."""

    id: UUID = Field(description="id of the project")
    name: str = Field(description="unique in the installation")
    role_patterns: list[dict[str, str]] = Field(
        description="patterns that give metrics their roles in runs whose trainers set none; the first match counts"
    )
    quotas: QuotasOut = Field(description="limits on runs, metrics, keys, endpoints and policies")
    paused_at: Time | None = Field(description="stops are paused since then; null: not paused")
    paused_by: str | None = Field(description="who paused it")
    paused_reason: str | None = Field(description="why it is paused")
    paused_until: Time | None = Field(description="when it resumes by itself; null: when a person resumes it")
    created_at: Time = Field(description="when it was created")


class Items(Answer, Generic[T]):
    """A complete list, in the order that the route states."""

    items: list[T] = Field(description="all that match")


class Page(Answer, Generic[T]):
    """A page of a list; pass `next_cursor` as `cursor` for the next page, null on the last one."""

    items: list[T] = Field(description="in the order that the route states, at most `limit`")
    next_cursor: str | None = Field(description="pass it as `cursor` for the next page; null: last page")
