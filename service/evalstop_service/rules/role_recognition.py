"""How a run's metrics got their roles, as it is stored and answered. Pure."""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict

from msgspec import Struct

RoleOrigin = Literal["declared", "recognized", "guessed"]
"""The values of `evalstop_detectors.RoleOrigin`, which the store does not know."""


COMBINED_METRIC = "evalstop/score"
"""The observations that several evals of a run become: their standardized weighted mean, higher is better."""


class MetricFields(TypedDict):
    """A metric with a role: the role, and what is better. Of an eval beside others also its weight, by default 1, and
    whether a lasting fall of it alone is one of the run."""

    role: str
    direction: str
    weight: NotRequired[float]
    critical: NotRequired[bool]


class Recognition(Struct, frozen=True):
    """Where the roles of a run's metrics come from.

    `open`: new names may change the roles. `preset`: the trainer whose names they are, None when no trainer's marks
    were seen. `sources`, `origins` and `reasons`: by metric, where its role comes from, how far that can be trusted (no
    run is stopped on a guess), and why it has it or none. `warnings` are for a person to read.
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
