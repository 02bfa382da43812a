"""Types and models that several resources of the API share."""

from __future__ import annotations

import builtins
import math
import re
import sys
import types
import typing
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Annotated, Any, Generic, Literal, Self, TypeVar, get_args, get_origin, get_type_hints
from uuid import UUID

from evalstop_detectors import Kind
from fastapi import Path, Query
from msgspec import Meta, Struct
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
from evalstop_service.domain.confidence_sequences import Estimate
from evalstop_service.domain.decision_lifecycle import Exploit, GuardKind
from evalstop_service.domain.fields import Body, Integral, Line, Outcome
from evalstop_service.domain.project_settings import list_settings
from evalstop_service.domain.run import BestCheckpoint, ChangePoint, Evidence, Verdict
from evalstop_service.projects.project_settings import QuotasIn
from evalstop_service.store.decisions import Decision
from evalstop_service.store.observations import MAX_STEP
from evalstop_service.store.projects import Project

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
ShouldStop = Annotated[
    bool, Field(description="true once the stop is handed over to the trainer: save a checkpoint and end")
]
EXPLOIT = "the copy of another run that this answer asks the trainer to make; null: none"
RunId = Annotated[UUID, Path(description="`id` of the run, as returned when it was opened or listed")]
DecisionId = Annotated[UUID, Path(description="`id` of the decision, as listed or sent in an event")]
EndpointId = Annotated[UUID, Path(description="`id` of the endpoint, as returned when it was created or listed")]
DeliveryId = Annotated[UUID, Path(description="`id` of the delivery, as listed")]
Limit = Annotated[int, Query(ge=1, le=200, description="maximum number of items per page")]
Scope = Literal["ingest", "read", "report", "operate", "admin"]

T = TypeVar("T")


class Answer(BaseModel):
    """A response, built from the attributes of an object."""

    model_config = ConfigDict(from_attributes=True)


A = TypeVar("A", bound=Answer)

_ANSWERS: dict[type, type[Answer]] = {}


def answers(record: type, names: str = "", *, without: str = "") -> Callable[[type[A]], type[A]]:
    """Add to an answer all fields that the record describes, or those named; its own fields count more.

    Records in these fields become their own answers, as declared before in the same module or here, else `<Record>Out`.
    """
    described = {
        name: (_to_answer(hint), Field(description=part.description))
        for name, hint in get_type_hints(record, include_extras=True).items()
        for part in getattr(hint, "__metadata__", ())
        if isinstance(part, Meta) and part.description
    }
    chosen = dict.fromkeys(names.split() or described)

    def complete(answer: type[A]) -> type[A]:
        own = {*answer.model_fields, *without.split()}
        fields: dict[str, Any] = {name: described[name] for name in chosen if name not in own}
        completed = create_model(
            answer.__name__, __base__=answer, __doc__=answer.__doc__, __module__=answer.__module__, **fields
        )
        if not (names or without):  # else it is not the whole answer
            _ANSWERS.setdefault(record, completed)
        return completed

    return complete


def _to_answer(hint: Any) -> Any:
    """The type in an answer of a field of a record."""
    parts = tuple(_to_answer(part) for part in get_args(hint) if part is not Ellipsis)
    match get_origin(hint):
        case None:
            if hint not in _ANSWERS and isinstance(hint, type) and issubclass(hint, Struct):
                answers(hint)(type(f"{hint.__name__}Out", (Answer,), {"__doc__": hint.__doc__, "__module__": __name__}))
            return Time if hint is datetime else _ANSWERS.get(hint, hint)
        case typing.Annotated:
            return parts[0]
        case typing.Union | types.UnionType:
            return typing.Union[parts]  # noqa: UP007 - of a number of types
        case builtins.tuple | builtins.frozenset:
            return list[parts]  # type: ignore[valid-type]
        case typing.Literal:
            return hint
        case origin:
            return origin[parts]


@answers(Evidence)
class FindingOut(Answer):
    """The evidence of one detector, and its thresholds."""

    kind: str = Field(description=f"what the number means: {', '.join(Kind)}")


@answers(Verdict)
class VerdictOut(Answer):
    """`continue`, `suspect` or `stop`, with its reason and the numbers behind it."""


@answers(Exploit)
class ExploitOut(Answer):
    """The checkpoint of another run that a run copies, and the hyperparameters that it goes on with."""


@answers(Decision, "id action state state_reason")
class DecisionStateOut(Answer):
    """The state of a decision on a run."""

    action: str = Field(description="stop: end the job, park: set it aside, exploit: copy another run")
    guard_kinds: list[str] = Field(description=f"the guards that hold it: {', '.join(GuardKind)}")


@answers(BestCheckpoint)
class BestCheckpointOut(Answer):
    """The checkpoint to ship."""


@answers(ChangePoint)
class TurnOut(Answer):
    """The change point in hindsight: where the eval turned, from all evals of an ended run."""


@answers(Estimate)
class EstimateOut(Answer):
    """A share with a 95 % confidence interval, valid however often you look; `value` is null without decided cases."""


class PolicyName(Answer):
    """A version of a policy."""

    name: str = Field(description="the name of the policy")
    version: int = Field(description="version, counted from 1")


class ActionIn(Body):
    """An action of a person, with its reason."""

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
    note: Line = Field("", description="for people")


class QuotasOut(QuotasIn):
    """The limits of the project; only administrators of the installation can change them."""

    model_config = ConfigDict(from_attributes=True)


_FIELDS: dict[str, Any] = {
    declared.name: (declared.bare, Field(description=declared.description)) for declared in list_settings()
}
_Settings: Any = create_model("_Settings", __base__=Answer, **_FIELDS)


@answers(Project)
class ProjectOut(_Settings):  # more of its fields are those of ProjectSettings
    """A project with its settings."""

    quotas: QuotasOut = Field(description="limits on runs, metrics, keys, endpoints and policies")


class Items(Answer, Generic[T]):
    """A complete list, in the order that the route states."""

    items: list[T] = Field(description="all that match")


class Page(Answer, Generic[T]):
    """A page of a list; pass `next_cursor` as `cursor` for the next page, null on the last one."""

    items: list[T] = Field(description="in the order that the route states, at most `limit`")
    next_cursor: str | None = Field(description="pass it as `cursor` for the next page; null: last page")

    @classmethod
    def of(cls, items: Sequence[Any], limit: int) -> Self:
        """The page of items whose cursors are their ids; one that is not full is the last."""
        return cls(items=list(items), next_cursor=str(items[-1].id) if len(items) == limit else None)
