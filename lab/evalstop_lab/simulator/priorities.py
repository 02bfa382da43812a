"""Jobs that are set aside rather than stopped: when, on which evidence, and when they return.

A policy's evidence about a job depends on the job's own evals, so that its priorities are decided ahead of time, by
eval; what they do to anybody's times is up to the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum


class Priority(IntEnum):
    """Who goes first. A demoted or parked job runs on GPUs that nobody else wants, and is paused for any other."""

    NORMAL = 0
    DEMOTED = 1
    PARKED = 2


Changes = tuple[tuple[int, Priority], ...]
"""Of one job: after which of its evals, from 1, its priority becomes which; in the order of evals."""


@dataclass(frozen=True)
class Priorities:
    """`changes` of the jobs that are ever set aside, by number. A demoted job returns after `most_hours`, until its
    evidence sets it aside anew; a parked one does not return by the clock."""

    changes: Mapping[int, Changes] = field(default_factory=dict)
    most_hours: float = 24.0


NEVER_SET_ASIDE = Priorities()
