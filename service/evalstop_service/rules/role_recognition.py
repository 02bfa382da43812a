"""How a run's metrics got their roles, as it is stored and answered. Pure."""

from __future__ import annotations

from msgspec import Struct


class Recognition(Struct, frozen=True):
    """Where the roles of a run's metrics come from.

    `open`: new names may change the roles. `preset`: the trainer whose names they are, None when no trainer's marks
    were seen. `sources` and `reasons`: by metric, where its role comes from, and why it has it or none. `warnings` are
    for a person to read.
    """

    open: bool
    preset: str | None = None
    sources: dict[str, str] = {}
    reasons: dict[str, str] = {}
    warnings: list[str] = []
