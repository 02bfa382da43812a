"""The limits of ingestion."""

from __future__ import annotations

from dataclasses import dataclass

from evalstop_service.ingest.costs import REPLAYS
from evalstop_service.security.rate_limits import Rate


@dataclass(frozen=True)
class Limits:
    """Limits on what is committed together and on what may wait.

    `commits`: concurrent commits, started when earlier ones are slow; the embedded database has one writer.
    `slow_seconds`: a commit that takes longer no longer blocks others, since it may wait for a lock that they do not
    need. `requests`, `observations`: in one commit. `waiting`: observations waiting or in a commit. `step_seconds`: a
    run whose detectors took longer in one commit is committed separately. `replays`: per key, caused by late
    observations.
    """

    commits: int = 4
    requests: int = 1000
    observations: int = 20_000
    waiting: int = 200_000
    step_seconds: float = 0.2
    slow_seconds: float = 0.05
    replays: Rate = REPLAYS
