"""The workload to be stopped: how it is found, and how it is suspended.

It is that of a run's labels, or the topmost of its controllers. It is suspended by its own flag, or by Kueue's.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from datetime import datetime

from evalstop_client.errors import RequestRefused
from evalstop_client.receivers.kubernetes.api import Api
from evalstop_client.receivers.kubernetes.kinds import (
    BY_NAME,
    POD,
    RAY_JOB,
    WORKLOAD,
    Kind,
    Object,
    at,
    find_controller,
    find_kind_of,
    set_field,
)
from evalstop_client.receivers.kubernetes.pods import digest_containers, parse_pod, parse_time
from evalstop_client.receivers.stop.job_control import Job

NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")


def read_labels(labels: Mapping[str, str], namespaces: frozenset[str] | None) -> tuple[Kind, str, str, str]:
    """The object that the labels name, validated: a label must not refer to anything else."""
    kind = BY_NAME.get(labels.get("kubernetes_kind") or "Job")
    if kind is None:
        raise RequestRefused(
            f"label kubernetes_kind is {labels['kubernetes_kind'][:80]!r}; it may be {', '.join(BY_NAME)}"
        )
    for label in ("kubernetes_namespace", "kubernetes_name", "kubernetes_uid"):
        if not NAME.fullmatch(labels.get(label, "")):
            raise RequestRefused(f"label {label} is {labels.get(label, '')[:80]!r}, which cannot be")
    namespace = labels["kubernetes_namespace"]
    if namespaces is not None and namespace not in namespaces:
        raise RequestRefused(f"namespace {namespace} is not on the allow-list")
    return kind, namespace, labels["kubernetes_name"], labels["kubernetes_uid"]


def find_topmost(api: Api, kind: Kind, item: Object) -> tuple[Kind, Object]:
    """Follow controllers to the top: anything stopped below is restarted by its controller."""
    while True:
        owner = find_controller(item)
        above = find_kind_of(owner["apiVersion"], owner["kind"]) if owner is not None else None
        if owner is None or above is None:
            break
        controller = api.get(above, item["metadata"]["namespace"], owner["name"])
        if controller is None or controller["metadata"]["uid"] != owner["uid"]:
            raise RequestRefused(f"{above} {owner['name']}, to which it belonged, no longer exists")
        kind, item = above, controller
    if kind is POD:
        controlled_by = f"{owner['kind']} {owner['name']}" if owner is not None else "nothing"
        raise RequestRefused(
            f"pod {item['metadata']['name']} is controlled by {controlled_by}, which cannot be suspended; run the "
            "training as a Job, or have the trainer read should_stop and then wait"
        )
    return kind, item


def list_facts(kind: Kind, item: Object) -> dict[str, str]:
    """The facts of a job: what identifies the workload and its pods, and its successor if a controller creates one."""
    metadata = item["metadata"]
    facts = {"kind": str(kind), "namespace": metadata["namespace"], "name": metadata["name"], "uid": metadata["uid"]}
    owner = find_controller(item)
    if owner is not None and owner["kind"] != "CronJob":  # which creates the next one anyway
        facts |= {"owner": f"{owner['kind']} {owner['name']}", "owner_uid": owner["uid"]}
        facts["containers"] = digest_containers(at(item, "spec", "template", "spec") or {})
    return {**facts, "selector": kind.selector(item)}


def find_successor(api: Api, job: Job) -> str | None:
    """The workload that the controller above, unknown to this receiver, created in place of the one that was ended.

    It has the same name, or pods with the same containers, created since the stop was found.
    """
    if "owner_uid" not in job.facts:
        return None
    kind, namespace = BY_NAME[job.facts["kind"]], job.facts["namespace"]
    candidates = [(kind, api.get(kind, namespace, job.facts["name"]))]
    for pod in api.list(POD, namespace, "").items:
        created_at = parse_time(pod["metadata"].get("creationTimestamp"))
        is_new = created_at is not None and created_at >= datetime.fromisoformat(job.facts["found_at"])
        if is_new and parse_pod(pod).holds and digest_containers(pod["spec"]) == job.facts["containers"]:
            with contextlib.suppress(RequestRefused):  # it belongs to nothing that can be stopped
                candidates.append(find_topmost(api, POD, pod))
    for kind, item in candidates:
        if item is None or item["metadata"]["uid"] == job.facts["uid"]:
            continue
        owner = find_controller(item)
        if owner is not None and owner["uid"] == job.facts["owner_uid"]:
            return f"{kind} {item['metadata']['name']}"
    return None


QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
JOB_UID_LABEL = "kueue.x-k8s.io/job-uid"
REASON = "evalstop.io/reason"


class Suspension:
    """Suspends and resumes workloads, by Kueue's objects for them where there are any."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._may_be_queued = True

    def suspend(self, kind: Kind, workload: Object, reason: str | None = None) -> None:
        """Suspend it, so that it has no pods until it is resumed; RequestRefused if the cluster cannot.

        It is annotated with the reason; None: as it is. Repeating it is harmless.
        """
        note = {REASON: reason} if reason else {}
        if queued := self._list_queued(workload):
            for queued_workload in queued:
                self._set_suspend(WORKLOAD, queued_workload, False, note)
            return
        changed = self._set_suspend(kind, workload, True, note)
        if changed is not None and at(changed, *kind.suspend_field) is not True:  # as it does with unknown fields
            raise RequestRefused(
                f"the API server accepted {'.'.join(kind.suspend_field)} of {kind} {workload['metadata']['name']} but "
                "dropped it: this cluster cannot suspend it"
            )

    def resume(self, kind: Kind, workload: Object) -> None:
        if queued := self._list_queued(workload):
            for queued_workload in queued:
                self._set_suspend(WORKLOAD, queued_workload, True, {REASON: None})
        else:
            self._set_suspend(kind, workload, False, {REASON: None})

    def is_held(self, kind: Kind, workload: Object) -> bool:
        """Whether it is stopped, confirmed by its controller, and will not restart by itself."""
        if at(workload, *kind.suspend_field) is not True or kind.suspended not in kind.list_states(workload):
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
        return self._api.merge(kind, item, change)


def is_queued(workload: Object) -> bool:
    """Whether Kueue's object waits for quota that others may free; not if its queue does not exist or is stopped."""
    conditions = at(workload, "status", "conditions") or []
    return (
        at(workload, *WORKLOAD.suspend_field) is not False
        and not WORKLOAD.list_states(workload) & {"QuotaReserved", "Admitted", "Finished"}
        and all(condition.get("reason") != "Inadmissible" for condition in conditions)
    )


def _list_owners(item: Object) -> list[Object]:
    return list(item["metadata"].get("ownerReferences") or [])
