"""Refuses requests that would change what may end which job, for runs that have observations."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from evalstop_service.errors import Conflict
from evalstop_service.ingest.open_request import OpenRequest
from evalstop_service.rules.labels import list_job_changes
from evalstop_service.store import keys
from evalstop_service.store.database import Transaction
from evalstop_service.store.keys import Key
from evalstop_service.store.runs import Run


def refuse_other_job(tx: Transaction, run: Run, labels: dict[str, str], key: Key | None, now: datetime) -> UUID | None:
    """Raise Conflict when a key that does not own the run would change its job; returns the owning key.

    Keys that may end jobs anyway may relabel any run. If the owning key is no longer valid, the next key becomes the
    owner.
    """
    changed = list_job_changes(run.labels, labels)
    if key is None or not run.has_begun or not changed or key.id == run.opened_by:
        return run.opened_by
    if run.opened_by is None or keys.find_key(tx, run.opened_by, now) is None:
        return key.id
    if not {"operate", "admin"}.isdisjoint(key.scopes):
        return run.opened_by
    raise Conflict(
        f"run {run.name!r} has observations and was opened with another key; only this key may change labels of its "
        f"job: {', '.join(changed)}; omit them, or give the new run another name"
    )


def refuse_other_terms(run: Run, request: OpenRequest) -> None:
    """Raise Conflict when the request would change what may end which job, for a run that has observations.

    A policy without a version matches any version. Labels may change when the run is resumed, possibly by another job,
    or in the job in which it runs.
    """
    other: list[str] = []
    if request.policy not in (None, run.policy_name, f"{run.policy_name}@{run.policy_version}"):
        other.append(f"policy {run.policy_name}@{run.policy_version}, not {request.policy}")
    if request.mode not in (None, run.mode):
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
