"""Quotas: limits on what a project may have, so that no project fills the installation. Pure."""

from __future__ import annotations

from datetime import datetime, timedelta
from enum import StrEnum
from typing import Annotated
from uuid import UUID

from msgspec import Meta, Struct

LEAST_METRICS = 100
"""The lowest possible quota of metrics: below it they are not counted."""

_Most = Annotated[int, Meta(ge=1, le=100_000_000)]


class Quota(StrEnum):
    """What is limited by a quota."""

    OPEN_RUNS = "open_runs"
    RUNS_PER_DAY = "runs_per_day"
    METRICS_PER_RUN = "metrics_per_run"
    KEYS = "keys"
    ENDPOINTS = "endpoints"
    POLICIES = "policies"
    EXPERIMENTS = "experiments"
    ARTIFACT_GIGABYTES = "artifact_gigabytes"


class Quotas(Struct, frozen=True, forbid_unknown_fields=True):
    """The limits of a project: runs that have not ended, runs opened in a day (UTC), metrics of a run, valid keys,
    endpoints, versions of policies, experiments of MLflow clients, and gigabytes of their artifacts."""

    open_runs: _Most = 10_000
    runs_per_day: _Most = 50_000
    metrics_per_run: Annotated[int, Meta(ge=LEAST_METRICS, le=100_000_000)] = 5_000
    keys: _Most = 1_000
    endpoints: _Most = 200
    policies: _Most = 1_000
    experiments: _Most = 1_000
    artifact_gigabytes: _Most = 1_000

    def get(self, quota: Quota) -> int:
        """The limit of one quota."""
        most: int = getattr(self, quota)
        return most


def begin_day(now: datetime) -> datetime:
    """The start of a time's day in UTC."""
    return now.replace(hour=0, minute=0, second=0, microsecond=0)


def first_id(moment: datetime) -> UUID:
    """The lowest UUIDv7 of a time."""
    return UUID(int=int(moment.timestamp() * 1000) << 80 | 0x7 << 76 | 0b10 << 62)


def seconds_to_wait(quota: Quota, now: datetime) -> float | None:
    """The seconds until a reached quota has room again; None if waiting does not help."""
    if quota is Quota.RUNS_PER_DAY:
        return (begin_day(now) + timedelta(days=1) - now).total_seconds()
    return 60.0 if quota is Quota.OPEN_RUNS else None
