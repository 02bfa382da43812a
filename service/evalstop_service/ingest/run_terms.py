"""Refuses requests that would change what may end which job: of another key's run, or of one that has observations."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from uuid import UUID

from evalstop_service.domain.statuses import OPEN
from evalstop_service.errors import Conflict
from evalstop_service.ingest.open_request import OpenRequest
from evalstop_service.store import keys
from evalstop_service.store.database import Transaction
from evalstop_service.store.keys import Key
from evalstop_service.store.runs import Run


def refuse_other_key(
    tx: Transaction, run: Run, changed: Collection[str], key: Key | None, now: datetime
) -> UUID | None:
    """Raise Conflict when a key that does not own the run would change these terms; returns the owning key.

    The key that opened a run owns it from then on. Keys that may end jobs anyway may change any run. If the owning key
    is no longer valid, the next key becomes the owner.
    """
    if key is None or not changed or key.id == run.opened_by:
        return run.opened_by
    if run.opened_by is None or keys.find_key(tx, run.opened_by, now) is None:
        return key.id
    if not {"operate", "admin"}.isdisjoint(key.scopes):
        return run.opened_by
    raise Conflict(
        f"run {run.name!r} was opened with another key; only this key may change its {', '.join(changed)}; "
        "omit them, or give the new run another name"
    )


def list_other_terms(run: Run, request: OpenRequest) -> list[str]:
    """The terms in a request that the run does not have: policy, mode, planned length, share of the eval, and the job
    of a run that has not ended. A policy without a version matches any version."""
    others = {
        "policy": request.policy not in (None, run.policy_name, f"{run.policy_name}@{run.policy_version}"),
        "mode": request.mode not in (None, run.mode),
        "total_steps": request.planned_steps not in (None, run.total_steps),
        "eval_share": request.eval_share not in (None, run.eval_share),
        "job": run.status in OPEN and request.job not in (None, run.job),
    }
    return [name for name, other in others.items() if other]


def refuse_other_terms(run: Run, request: OpenRequest) -> None:
    """Raise Conflict when the request would change what may end which job, for a run that has observations.

    Labels may change when the run is resumed, possibly by another job, or in the job in which it runs.
    """
    terms = list_other_terms(run, request)
    other: list[str] = []
    if "policy" in terms:
        other.append(f"policy {run.policy_name}@{run.policy_version}, not {request.policy}")
    if "mode" in terms:
        other.append(f"mode {run.mode}, not {request.mode}")
    if request.resume is None and (request.job is None or request.job != run.job):
        other += [
            f"label {name} {run.labels[name]!r}, not {value!r}"
            for name, value in (request.labels or {}).items()
            if run.labels.get(name, value) != value
        ]
    if other:
        raise Conflict(
            f"run {run.name!r} has observations and keeps its terms: {'; '.join(other)}; "
            "omit them, or give the new run another name"
        )
