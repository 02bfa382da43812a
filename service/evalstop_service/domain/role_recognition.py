"""How a run's metrics got their roles, in the form of rows and responses. Pure."""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict

from msgspec import Struct

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
    """Where the roles of a run's metrics come from.

    `open`: new names may change the roles. `preset`: the trainer library whose names were recognized, None if none was.
    `sources`, `origins` and `reasons`: by metric, where its role comes from, how far that can be trusted (no
    run is stopped on a guess), and why it has it or none. `warnings` are for people.
    """

    open: bool
    preset: str | None = None
    sources: dict[str, str] = {}
    origins: dict[str, RoleOrigin] = {}
    reasons: dict[str, str] = {}
    warnings: list[str] = []

    @property
    def guessed(self) -> list[str]:
        """The metrics whose role or direction is a guess, by name."""
        return sorted(metric for metric, origin in self.origins.items() if origin == "guessed")
