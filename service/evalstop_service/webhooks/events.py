"""What an event says: the same shape for every type, as far as it applies. Pure."""

from __future__ import annotations

from typing import Any

from evalstop_service.clock import rfc3339
from evalstop_service.store.decisions import Decision
from evalstop_service.store.projects import Project
from evalstop_service.store.runs import Run


def data(project: Project, run: Run, decision: Decision | None) -> dict[str, Any]:
    """The `data` of an event about a run."""
    return {
        "project": {"id": str(project.id), "name": project.name},
        "run": {"id": str(run.id), "name": run.name, "attempt": run.attempt, "labels": run.labels},
        "verdict": run.verdict,
        "best_checkpoint": run.best_checkpoint,
        "decision": decision
        and {
            "id": str(decision.id),
            "state": decision.state,
            "step": decision.step,
            "due_at": rfc3339(decision.due_at),
        },
    }
