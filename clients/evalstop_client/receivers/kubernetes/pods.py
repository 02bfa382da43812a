"""The pods of one job, remembered from one list to the next: the end of a pod is known even after it is deleted."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from evalstop_client.observations import format_time
from evalstop_client.receivers.kubernetes.api import Api
from evalstop_client.receivers.kubernetes.kinds import POD, Object, at

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
    owners = [reference for reference in metadata.get("ownerReferences") or [] if reference.get("controller")]
    return Pod(
        uid=metadata["uid"],
        name=metadata["name"],
        phase=status.get("phase") or "Unknown",
        node=at(item, "spec", "nodeName") or "",
        controller_uid=owners[0]["uid"] if owners else "",
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
    times = [time for end in ends if (time := parse_time(end.get("finishedAt"))) is not None]
    return {
        "exit_code": next((code for code in codes if code), 0) if codes else None,
        "ended_at": format_time(max(times)) if times else None,
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
        listing = self._api.list(POD, self._namespace, self.selector)
        present = {pod.uid: pod for pod in map(parse_pod, listing.items)}
        missed = {uid: replace(pod, is_there=False) for uid, pod in self._pods_by_uid.items() if uid not in present}
        self._pods_by_uid = missed | present
        return listing.at
