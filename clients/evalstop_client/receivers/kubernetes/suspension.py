"""Stops and resumes a workload: with its own suspend flag, Kueue's, a command to Volcano, or by deleting it.

Changes are read back: an API server silently drops fields that it does not know.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from evalstop_client.errors import RequestRefused, SchedulerUnavailable
from evalstop_client.receivers.kubernetes.api import Api, Conflict
from evalstop_client.receivers.kubernetes.kinds import (
    COMMAND,
    JOB,
    RAY_JOB,
    VOLCANO_JOB,
    WORKLOAD,
    Kind,
    Object,
    at,
    set_field,
)

logger = logging.getLogger("evalstop_client.receivers")

STOP_METHODS = ("suspend", "delete")
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
JOB_UID_LABEL = "kueue.x-k8s.io/job-uid"
STOPPED_BY = "evalstop.io/decision"
PARALLELISM = "evalstop.io/parallelism"
TRIES = 5


class Suspension:
    """`stop_by`: one of STOP_METHODS."""

    def __init__(self, api: Api, stop_by: str) -> None:
        self._api = api
        self._deletes = stop_by == "delete"
        self._may_be_queued = True

    def stop(self, kind: Kind, workload: Object, decision_id: str | None = None) -> None:
        """Stop it permanently, annotated with the decision; repeating it is harmless."""
        if self._deletes:
            self._delete_workload(kind, workload)
        else:
            self.suspend(kind, workload, decision_id)

    def suspend(self, kind: Kind, workload: Object, decision_id: str | None = None) -> None:
        """Suspend it, so that it has no pods until it is resumed; RequestRefused if the cluster cannot."""
        note = {STOPPED_BY: decision_id} if decision_id else {}
        if kind is VOLCANO_JOB:
            self._command_job(workload, "AbortJob")
        elif queued := self._list_queued(workload):
            for queued_workload in queued:
                self._set_suspend(WORKLOAD, queued_workload, False, note)
        else:
            changed = self._set_suspend(kind, workload, True, note)
            if changed is not None and at(changed, *kind.suspend_field) is not True:
                self._stop_without_suspend(kind, changed)

    def resume(self, kind: Kind, workload: Object) -> None:
        if kind is VOLCANO_JOB:
            self._command_job(workload, "ResumeJob")
        elif queued := self._list_queued(workload):
            for queued_workload in queued:
                self._set_suspend(WORKLOAD, queued_workload, True, {STOPPED_BY: None})
        elif (before := _read_parallelism_before(workload)) is not None:
            annotations = {PARALLELISM: None, STOPPED_BY: None}
            change = {"spec": {"parallelism": before}, "metadata": {"annotations": annotations}}
            self._merge_change(kind, workload, lambda _: change)
        else:
            self._set_suspend(kind, workload, False, {STOPPED_BY: None})

    def is_held(self, kind: Kind, workload: Object) -> bool:
        """Whether it is stopped, confirmed by its controller, and will not restart by itself."""
        if _read_parallelism_before(workload) is not None:
            return at(workload, "spec", "parallelism") == 0 and not at(workload, "status", "active")
        is_asked = not kind.suspend_field or at(workload, *kind.suspend_field) is True
        if not is_asked or not kind.list_states(workload) & kind.suspended:
            return False
        return all(at(queued, *WORKLOAD.suspend_field) is False for queued in self._list_queued(workload))

    def _list_queued(self, workload: Object) -> list[Object]:
        """Kueue's objects for it: none if Kueue does not manage it, which it may do without a label for its queue."""
        metadata = workload["metadata"]
        has_queue = QUEUE_LABEL in (metadata.get("labels") or {})
        if not (has_queue or self._may_be_queued):
            return []
        try:
            queued = self._api.list(WORKLOAD, metadata["namespace"], f"{JOB_UID_LABEL}={metadata['uid']}").items
        except RequestRefused:  # the cluster has no Kueue, or the receiver's Role leaves it out
            if has_queue:
                raise
            self._may_be_queued = False
            return []
        return [item for item in queued if any(owner["uid"] == metadata["uid"] for owner in _list_owners(item))]

    def _set_suspend(self, kind: Kind, item: Object, value: bool, annotations: Object) -> Object | None:
        """Set its suspend field; returns the resulting object, None if it is gone."""
        change = {**set_field(kind.suspend_field, value), "metadata": {"annotations": annotations}}
        if value and kind is RAY_JOB:  # in the same patch: KubeRay gives up a RayJob that is suspended without it
            change["spec"]["shutdownAfterJobFinishes"] = True
        return self._merge_change(kind, item, lambda _: change)

    def _stop_without_suspend(self, kind: Kind, workload: Object) -> None:
        """Scale a batch/v1 Job to 0, which Kubernetes before 1.21 cannot suspend."""
        description, field = f"{kind} {workload['metadata']['name']}", ".".join(kind.suspend_field)
        if kind is not JOB:
            raise RequestRefused(
                f"the API server accepted {field} of {description} but dropped it: this cluster cannot suspend it; "
                "--stop-by delete would delete it"
            )
        logger.warning("%s: the API server dropped %s; setting its parallelism to 0 instead", description, field)
        self._merge_change(kind, workload, _remove_pods)

    def _merge_change(self, kind: Kind, item: Object, change: Callable[[Object], dict[str, Any]]) -> Object | None:
        """Change this object, by uid, and read it again after each conflict; None if it is gone."""
        namespace, name, uid = (item["metadata"][field] for field in ("namespace", "name", "uid"))
        for _ in range(TRIES):
            current = self._api.get(kind, namespace, name)
            if current is None or current["metadata"]["uid"] != uid:
                return None
            patch = change(current)
            guard = {"resourceVersion": current["metadata"]["resourceVersion"]}  # unique to this object
            patch = {**patch, "metadata": {**patch["metadata"], **guard}}
            answer = self._api.merge(kind, namespace, name, patch)
            if not isinstance(answer, Conflict):
                changed = self._api.get(kind, namespace, name)
                return None if changed is None or changed["metadata"]["uid"] != uid else changed
        raise SchedulerUnavailable(f"{kind} {name} keeps being changed by others")

    def _delete_workload(self, kind: Kind, workload: Object) -> None:
        """Delete it in the foreground: its pods go first, so that it stays visible until then. Checks its uid."""
        metadata = workload["metadata"]
        options = {"propagationPolicy": "Foreground", "preconditions": {"uid": metadata["uid"]}}
        self._api.delete(kind, metadata["namespace"], metadata["name"], options)

    def _command_job(self, workload: Object, action: str) -> None:
        """Send a command to Volcano, which deletes it when done; one that still exists has the same effect."""
        metadata = workload["metadata"]
        target = {
            "apiVersion": workload["apiVersion"],
            "kind": workload["kind"],
            "name": metadata["name"],
            "uid": metadata["uid"],
            "controller": True,
        }
        name = f"evalstop-{action.lower()}-{metadata['uid']}"
        command = {"metadata": {"name": name, "ownerReferences": [target]}, "action": action, "target": target}
        self._api.create(COMMAND, metadata["namespace"], command)


def is_queued(workload: Object) -> bool:
    """Whether Kueue's object waits for quota that others may free; not if its queue does not exist or is stopped."""
    conditions = at(workload, "status", "conditions") or []
    return (
        at(workload, *WORKLOAD.suspend_field) is not False
        and not WORKLOAD.list_states(workload) & {"QuotaReserved", "Admitted", "Finished"}
        and all(condition.get("reason") != "Inadmissible" for condition in conditions)
    )


def _remove_pods(workload: Object) -> dict[str, Any]:
    """Set parallelism to 0, and annotate the previous value."""
    before = _read_parallelism_before(workload)
    noted = str(at(workload, "spec", "parallelism") if before is None else before)
    return {"spec": {"parallelism": 0}, "metadata": {"annotations": {PARALLELISM: noted}}}


def _read_parallelism_before(workload: Object) -> int | None:
    noted = at(workload, "metadata", "annotations", PARALLELISM)
    return int(noted) if isinstance(noted, str) and noted.isdecimal() else None


def _list_owners(item: Object) -> list[Object]:
    return list(item["metadata"].get("ownerReferences") or [])
