"""What speaks against stopping a run now, whatever its detectors say."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from evalstop_service.store.database import Transaction
from evalstop_service.store.projects import Project
from evalstop_service.store.runs import Run


@dataclass(frozen=True)
class Brake:
    """One reason to hold a stop back: its `kind` for machines, the `reason` for people, and the numbers behind it."""

    kind: str
    reason: str
    details: dict[str, Any] = field(default_factory=dict)


def holding(tx: Transaction, project: Project, run: Run, now: datetime) -> tuple[Brake, ...]:
    """What holds a stop of this run back, the run being locked; nothing when it may be stopped."""
    return ()
