"""Posted batches of observations: decoded by msgspec; pydantic explains what is wrong with a refused one."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from pydantic import BeforeValidator, Field

from evalstop_service.clock import in_utc
from evalstop_service.domain.fields import Body, Name
from evalstop_service.store.observations import PostedObservation
from evalstop_service.web.api.schemas import MAX_POINTS, MAX_STEP, Measured, Step, Time


class SentObservation(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """An observation in JSON: its step may be written 120.0, its value may be a string for NaN or an infinity."""

    metric: Annotated[str, Meta(min_length=1, max_length=256)]
    step: Annotated[int, Meta(ge=0, le=MAX_STEP)] | Annotated[float, Meta(ge=0, le=MAX_STEP)]
    value: float | Literal["NaN", "Infinity", "-Infinity"]
    stderr: Annotated[float, Meta(ge=0)] | None = None
    time: datetime | None = None

    def to_observation(self) -> PostedObservation:
        """Convert to the observation to store; raises ValueError."""
        step = int(self.step)
        if step != self.step:
            raise ValueError(f"a step is a whole number, not {self.step}")
        time = None if self.time is None else in_utc(self.time)
        return PostedObservation(self.metric, step, float(self.value), self.stderr, time)


class _Batch(msgspec.Struct, forbid_unknown_fields=True):
    observations: Annotated[list[SentObservation], Meta(min_length=1, max_length=MAX_POINTS)]


_decode = msgspec.json.Decoder(_Batch).decode

UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)
"""What decoding raises. The decoder takes the last of duplicate names: callers must check for these."""


def decode_batch(body: bytes) -> tuple[PostedObservation, ...]:
    """The observations of a batch. Raises one of `UNREADABLE`."""
    return tuple([point.to_observation() for point in _decode(body).observations])


class ObservationIn(Body):
    """One value of one metric at one step."""

    metric: Name = Field(description="the name of the series", examples=["eval"])
    step: Step = Field(description="the training step at which it was measured", examples=[120])
    value: Measured = Field(description="in the unit of the metric", examples=[0.31])
    stderr: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = Field(
        None, description="the standard error of the value, in its unit", examples=[0.02]
    )
    time: Time | None = Field(None, description="when it was measured")


def _few_enough(points: Any) -> Any:
    # Check the number first: a million observations can have a million errors.
    if isinstance(points, list) and len(points) > MAX_POINTS:
        raise ValueError(f"{len(points)} observations; a batch may have 1 to {MAX_POINTS}")
    return points


class BatchIn(Body):
    """Observations in any order; repeats are harmless."""

    observations: Annotated[
        list[ObservationIn], Field(min_length=1, max_length=MAX_POINTS), BeforeValidator(_few_enough)
    ] = Field(description="at most 10,000, of any metrics and steps")
