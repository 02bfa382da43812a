"""The words of the API: what requests may hold and what answers hold."""

from __future__ import annotations

import math
import re
import sys
from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

from evalstop_detectors import Kind
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    WithJsonSchema,
)

from evalstop_service.clock import in_utc, rfc3339
from evalstop_service.rules.fields import Body as Body
from evalstop_service.rules.fields import Line as Line
from evalstop_service.rules.fields import Mode as Mode
from evalstop_service.rules.fields import Name as Name
from evalstop_service.rules.fields import Outcome as Outcome
from evalstop_service.rules.fields import Plain as Plain
from evalstop_service.rules.fields import Role as Role
from evalstop_service.rules.fields import Whole as Whole

MAX_STEP = 2**53 - 1
"""The largest integer that every JSON reader keeps exact."""

MAX_POINTS = 10_000

_MOST = sys.float_info.max
_MOMENT = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d", re.ASCII)


def _measured(value: Any) -> Any:
    if isinstance(value, str) and value in ("NaN", "Infinity", "-Infinity"):
        return float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -_MOST <= value <= _MOST:
        raise ValueError('a number that a double can hold, or one of the strings "NaN", "Infinity", "-Infinity"')
    return value


def _said(moment: Any) -> Any:
    if isinstance(moment, datetime) or (isinstance(moment, str) and _MOMENT.match(moment)):
        return moment
    raise ValueError("a time as in 2026-01-01T00:00:00Z")


def written(value: float) -> float | str:
    """A number as JSON can hold it."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return value


Step = Annotated[Whole, Field(ge=0, le=MAX_STEP)]
Time = Annotated[
    datetime,
    Field(strict=False),
    BeforeValidator(_said),
    AfterValidator(in_utc),
    PlainSerializer(rfc3339, return_type=str),
]
_NUMBER = {"anyOf": [{"type": "number"}, {"type": "string", "enum": ["NaN", "Infinity", "-Infinity"]}]}
Measured = Annotated[float, BeforeValidator(_measured), WithJsonSchema(_NUMBER)]
"""A number as it is sent."""
Stored = Annotated[float, PlainSerializer(written), WithJsonSchema(_NUMBER)]
"""A number as it is answered; JSON has no NaN and no infinities."""
Scope = Literal["ingest", "read", "operate", "admin"]


class Answer(BaseModel):
    """An answer, read from the attributes of what it is about."""

    model_config = ConfigDict(from_attributes=True)


class FindingOut(Answer):
    """The evidence of one detector beside the thresholds that it was held against."""

    detector: str
    roles: list[str]
    kind: str = Field(description=f"what the number means: {', '.join(Kind)}")
    value: float
    suspect_at: float | None
    stop_at: float | None
    turn_step: int | None
    note: str


class VerdictOut(Answer):
    """`continue`, `suspect` or `stop`, with its reason and the numbers behind it."""

    verdict: Literal["continue", "suspect", "stop"]
    step: int | None
    turn_step: int | None = Field(description="the step at which the detectors believe the turn was")
    reason: str
    evidence: list[FindingOut]


class BestOut(Answer):
    """The checkpoint one should ship."""

    step: int
    uri: str
    score: float = Field(description="as measured at this step")
    chosen_by: str
    smoothed: float | None = Field(None, description="the score that the rule believes in, from the evals around it")
    smoothed_stderr: float | None = Field(None, description="its standard error, of the noise alone")


class RawMaximumOut(Answer):
    """The highest eval as measured, whether or not a checkpoint of it exists."""

    step: int
    score: float


class TurnOut(Answer):
    """Where gold turned, told with hindsight from all evals of a run that has ended."""

    step: int = Field(description="the last eval before gold fell for good")
    low_step: int = Field(description="the first of the steps between which the peak lies")
    high_step: int = Field(description="the last of them")
    gain: float = Field(description="how much better gold was there than at the first eval, in its unit")
    drop: float = Field(description="how much worse gold was at the last eval")


class PolicyName(Answer):
    """Which version of which policy."""

    name: str
    version: int


class WordIn(Body):
    """Who says so, and why."""

    actor: Name | None = Field(None, description="by default the name of the key", examples=["dana"])
    reason: Line = Field(examples=["the eval set was broken this morning"])


class OutcomeIn(Body):
    """What turned out to be true of what was decided: to stop a run, or to let it go on."""

    outcome: Outcome
    turn_step: Step | None = None
    actor: Name | None = Field(None, description="by default the name of the key")
    note: Line = ""


class ProjectOut(Answer):
    """A tenant, and what its runs get when they do not say otherwise."""

    id: UUID
    name: str
    default_policy: str
    default_mode: Mode
    veto_window_seconds: float
    retention_days: int | None = Field(None, description="how long a run keeps its details after its end")
    stops_per_hour: int | None = Field(description="as many stops there may be in an hour; null: any number")
    stops_share: float | None = Field(description="of its runs at most this share may be stopped in an hour; null: all")
    confirm_seconds: float = Field(description="how long a stop may wait for its confirmation before it is escalated")
    stale_seconds: float = Field(description="a run is not stale before it was silent for so long")
    role_patterns: list[dict[str, str]] = Field(
        description="by which metrics get their roles in runs whose trainers do not say it; the first that fits counts"
    )
    held_out_share: float = Field(description="of its stops: let run, to learn whether they are right")
    price_per_gpu_hour: float | None = Field(description="null: not said")
    currency: str
    paused_at: Time | None = Field(description="since then nothing is stopped; null: it is not paused")
    paused_by: str | None
    paused_reason: str | None
    created_at: Time


class Page(BaseModel):
    """Part of a list; `next_cursor` asks for the part after it, null at the end."""

    next_cursor: str | None
