"""How a run's metrics got their roles, in the form of rows and responses. Pure."""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired, TypedDict

from msgspec import Struct

from evalstop_service.domain.fields import doc

RoleOrigin = Literal["declared", "recognized", "guessed"]
"""The values of `evalstop_detectors.RoleOrigin`; the store does not import detectors."""


COMBINED_METRIC = "evalstop/score"
"""The series that combines several evals of a run: their standardized weighted mean, higher is better."""


class MetricFields(TypedDict):
    """A metric with a role: the role, and the direction. One of several evals also has its weight, by default 1, and
    whether a lasting fall of it alone counts as a fall of the run."""

    role: str
    direction: str
    weight: NotRequired[float]
    critical: NotRequired[bool]


class Recognition(Struct, frozen=True):
    """Where the roles of a run's metrics come from. No run is stopped on a guess."""

    open: Annotated[bool, doc("true: new metrics can still change the roles")]
    preset: Annotated[str | None, doc("the known trainer whose metric names match")] = None
    sources: Annotated[
        dict[str, str],
        doc("by metric: trainer, default, preset NAME, names (a common name), pattern (of the project), person"),
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
