"""Priorities of jobs that are set aside instead of stopped: when, and when they return.

A policy's evidence about a job depends only on the job's own evals, so its priorities are decided in advance, by eval;
the engine determines their effect on times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum


class Priority(IntEnum):
    """The priority of a job. A demoted or parked job runs only on idle GPUs, and is paused for any other."""

    NORMAL = 0
    DEMOTED = 1
    PARKED = 2


Changes = tuple[tuple[int, Priority], ...]
"""The priority changes of one job: the eval, from 1, after which each priority applies; in order of evals."""


@dataclass(frozen=True)
class Priorities:
    """`changes`: of each job that is set aside, by number. `most_hours`: the time after which a demoted job returns,
    until its evidence demotes it again; a parked job returns only by its evidence."""

    changes: Mapping[int, Changes] = field(default_factory=dict)
    most_hours: float = 24.0


NEVER_SET_ASIDE = Priorities()
