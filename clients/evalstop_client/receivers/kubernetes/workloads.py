"""The workload to be stopped: how it is found, how it is suspended, and its pods.

It is that of a run's labels, or the topmost of its controllers. It is suspended by its own flag, or by Kueue's. Its
pods are remembered from one list to the next: the end of a pod is known even after it is deleted.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

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
    list_owners,
    set_field,
)
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
    for pod in api.list(POD, namespace, "")[0]:
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
            queued = self._api.list(WORKLOAD, metadata["namespace"], f"{JOB_UID_LABEL}={metadata['uid']}")[0]
        except RequestRefused:  # the cluster has no Kueue, or the receiver's Role leaves it out
            if has_queue:
                raise
            self._may_be_queued = False
            return []
        return [item for item in queued if metadata["uid"] in {owner["uid"] for owner in list_owners(item)}]

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


LOST_NODE = ("DeletionByTaintManager", "DeletionByPodGC", "NodeLost", "NodeStatusUnknown")
"""Why Kubernetes deletes pods when their node does not answer."""

ENDED_PHASES = ("Succeeded", "Failed")


@dataclass(frozen=True)
class Pod:
    """A pod as it was last seen; times are the API server's."""

    uid: str
    name: str
    phase: str
    node: str = ""
    controller_uid: str = ""
    created_at: datetime | None = None
    delete_at: datetime | None = None  # when its grace period ends; None: not deleted
    ends: tuple[Object, ...] = ()  # as its containers' statuses have them
    is_there: bool = True
    is_forced: bool = False  # deleted without a word from its node

    @property
    def is_unproven(self) -> bool:
        """Whether its processes may still run: its node, which may be lost, never said that they have ended."""
        return not self.is_there and self.is_forced and self.phase == "Running" and not self.ends

    @property
    def holds(self) -> bool:
        """Whether it holds resources or may get some: until its containers have ended or its node has released it."""
        return self.is_there and self.phase not in ENDED_PHASES

    @property
    def state(self) -> str:
        """The state as shown by kubectl."""
        return "Terminating" if self.delete_at is not None else self.phase


def parse_pod(item: Object) -> Pod:
    metadata, status = item["metadata"], item.get("status") or {}
    controller = find_controller(item)
    return Pod(
        uid=metadata["uid"],
        name=metadata["name"],
        phase=status.get("phase") or "Unknown",
        node=at(item, "spec", "nodeName") or "",
        controller_uid=controller["uid"] if controller is not None else "",
        created_at=parse_time(metadata.get("creationTimestamp")),
        delete_at=parse_time(metadata.get("deletionTimestamp")),
        is_forced=any(
            condition.get("reason") in LOST_NODE for condition in status.get("conditions") or [] if condition
        ),
        ends=tuple(end for each in status.get("containerStatuses") or [] if (end := at(each, "state", "terminated"))),
    )


def is_unschedulable(item: Object) -> bool:
    """Whether the scheduler has found no node for a pod; one that is gated by its owner is not asked about."""
    return any(
        (condition["type"], condition.get("reason")) == ("PodScheduled", "Unschedulable")
        for condition in at(item, "status", "conditions") or []
    )


def summarize_pods(pods: Iterable[Pod]) -> dict[str, Any]:
    """The end of these pods for the report: the first nonzero exit code stands for all."""
    pods = sorted(pods, key=lambda pod: pod.name)
    ends = [end for pod in pods for end in pod.ends]
    codes = [int(end.get("exitCode", 0)) for end in ends]
    return {
        "exit_code": next((code for code in codes if code), 0) if codes else None,
        "pods_total": len(pods),
    }


def parse_time(text: Any) -> datetime | None:
    """A time as the API writes it."""
    return datetime.fromisoformat(text) if isinstance(text, str) else None


def digest_containers(spec: Object) -> str:
    """What the containers of a pod or of its template run, in short."""
    run = [
        [container.get(field) for field in ("image", "command", "args")] for container in spec.get("containers") or []
    ]
    return hashlib.sha256(json.dumps(run).encode()).hexdigest()[:16]


class SeenPods:
    """The pods that a selector selects, including deleted ones, as they were last seen."""

    def __init__(self, api: Api, namespace: str, selector: str, controller_uid: str | None) -> None:
        """`controller_uid`: the uid of the controller that its pods name; None if they name another object."""
        self._api = api
        self._namespace = namespace
        self.selector = selector
        self._controller_uid = controller_uid
        self._pods_by_uid: dict[str, Pod] = {}
        self._forced: set[str] = set()
        self.successor_at: datetime | None = None

    @property
    def own(self) -> list[Pod]:
        """Every pod of the job as last seen, without those of a successor with the same name and labels.

        A pod created in the second of `successor_at` is the successor's, which creates its pods immediately.
        """
        if self._controller_uid is not None:
            return [pod for pod in self._pods_by_uid.values() if pod.controller_uid == self._controller_uid]
        before = self.successor_at
        return [
            pod for pod in self._pods_by_uid.values() if before is None or not pod.created_at or pod.created_at < before
        ]

    @property
    def holding(self) -> list[Pod]:
        """The pods that hold resources or may get some."""
        return [pod for pod in self.own if pod.holds]

    def mark_forced(self, uid: str) -> None:
        """Note that a pod is deleted without a word from its node."""
        if uid in self._pods_by_uid:
            self._forced.add(uid)

    @property
    def unproven(self) -> list[Pod]:
        """The pods that are gone from the API only."""
        seen = [replace(pod, is_forced=pod.is_forced or pod.uid in self._forced) for pod in self.own]
        return [pod for pod in seen if pod.is_unproven]

    def list(self) -> datetime:
        """List all pods; returns the API server's time."""
        items, now = self._api.list(POD, self._namespace, self.selector)
        present = {pod.uid: pod for pod in map(parse_pod, items)}
        missed = {uid: replace(pod, is_there=False) for uid, pod in self._pods_by_uid.items() if uid not in present}
        self._pods_by_uid = missed | present
        return now
