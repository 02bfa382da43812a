"""A batch of observations as it is posted, and what is wrong with one that is refused."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from evalstop_service.web.api.schemas import MAX_POINTS, Body, Measured, Name, Step, Time


class ObservationIn(Body):
    """One value of one metric at one step."""

    metric: Name = Field(examples=["eval"])
    step: Step = Field(examples=[120])
    value: Measured = Field(examples=[0.31])
    stderr: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = Field(
        None, description="the standard error of the value, in its unit", examples=[0.02]
    )
    time: Time | None = Field(None, description="when it was measured")


def _few_enough(points: Any) -> Any:
    # Before the points are looked at: a million of them can be wrong in a million ways.
    if isinstance(points, list) and len(points) > MAX_POINTS:
        raise ValueError(f"{len(points)} points; a batch may hold 1 to {MAX_POINTS}")
    return points


class BatchIn(Body):
    """Observations in any order; repeats are harmless."""

    observations: Annotated[
        list[ObservationIn], Field(min_length=1, max_length=MAX_POINTS), BeforeValidator(_few_enough)
    ]
