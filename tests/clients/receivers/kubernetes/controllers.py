"""Substitutes for a cluster's controllers, over HTTP: they create pods, delete them on suspension, and set statuses.

On a real API server Kubernetes' own controller handles batch/v1 Jobs. Those of Kueue, JobSet, Kubeflow and KubeRay
have substitutes there too.
"""

from __future__ import annotations

import contextlib
import threading
import uuid
from typing import Any

import httpx
from evalstop_client.receivers.kubernetes.kinds import (
    JOB,
    JOBSET,
    KINDS,
    MPI_JOB,
    POD,
    PYTORCH_JOB,
    RAY_CLUSTER,
    RAY_JOB,
    TRAIN_JOB,
    WORKLOAD,
    Kind,
    at,
    find_kind_of,
    set_field,
)

from tests.clients.receivers.kubernetes.admin import Admin, Json, api_version

PAUSE_SECONDS = 0.03


class Controllers:
    """All controllers in one thread. `runs_jobs`: also that of batch/v1 Jobs."""

    def __init__(self, admin: Admin, runs_jobs: bool) -> None:
        self._admin = admin
        self._kinds = [kind for kind in KINDS if kind is not JOB or runs_jobs]
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Controllers:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        reconciled = ""
        while not self._ended.is_set():
            with contextlib.suppress(httpx.HTTPError):  # the server is down, or an object has changed meanwhile
                if (version := self._admin.read_version()) != reconciled:
                    self._reconcile_all()
                    reconciled = version
            self._ended.wait(PAUSE_SECONDS)

    def _reconcile_all(self) -> None:
        for workload in self._admin.list(WORKLOAD):
            self._apply_kueue_workload(workload)
        for kind in self._kinds:
            for item in self._admin.list(kind):
                if not item["metadata"].get("deletionTimestamp"):
                    self._reconcile(kind, item)

    def _reconcile(self, kind: Kind, item: Json) -> None:
        if kind.list_states(item) & kind.ended or at(item, "status", "jobDeploymentStatus") == "ValidationFailed":
            return
        if kind is RAY_JOB and self._is_suspended(kind, item) and not _permits_suspend(item):
            self._admin.set_status(kind, item, {**item["status"], "jobDeploymentStatus": "ValidationFailed"})
            return
        if kind is RAY_JOB and not self._is_suspended(kind, item) and not at(item, "status", "rayClusterName"):
            name = f"{item['metadata']['name']}-{uuid.uuid4().hex[:5]}"  # another one whenever it is resumed
            item["status"] = {**item.get("status", {}), "rayClusterName": name}
        children = [
            (child_kind, child)
            for child_kind in _list_child_kinds(kind)
            for child in self._list_owned(child_kind, item)
        ]
        wanted = (
            {}
            if self._is_suspended(kind, item)
            else {child["metadata"]["name"]: child for child in _make_children(kind, item)}
        )
        for child_kind, child in children:
            if child["metadata"]["name"] not in wanted and not child["metadata"].get("deletionTimestamp"):
                self._admin.delete(child_kind, child, propagationPolicy="Background")
        ended = {at(child, "status", "phase") for child_kind, child in children if child_kind is POD} & {
            "Succeeded",
            "Failed",
        }
        if kind is JOB and ended and wanted:
            self._set_state(kind, item, {"Succeeded": "Complete"}.get(min(ended), "Failed"), len(children))
            return
        existing = {child["metadata"]["name"] for _, child in children}
        for name, child in wanted.items():
            if name not in existing:
                self._admin.create(_find_kind(child), item["metadata"]["namespace"], child)
        suspended = not wanted and (kind is not JOB or not children)
        self._set_state(kind, item, kind.suspended if suspended else "", len(children))

    def _is_suspended(self, kind: Kind, item: Json) -> bool:
        return at(item, *kind.suspend_field) is True

    def _set_state(self, kind: Kind, item: Json, state: str, active: int) -> None:
        """Set the status of a workload to one state: a phase, or conditions."""
        status: Json = {"active": active} if kind is JOB else {}
        if kind.phase:
            status = {**status, **set_field(kind.phase[1:], state or "Running")}
        else:
            types = sorted({kind.suspended} | ({state} if state else set()))
            status["conditions"] = [{"type": name, "status": "True" if name == state else "False"} for name in types]
            if state == "Failed":
                status["conditions"][types.index(state)]["reason"] = "BackoffLimitExceeded"
        if kind is RAY_JOB:
            status["rayClusterName"] = "" if state else item["status"]["rayClusterName"]
        if any(at(item, "status", name) != value for name, value in status.items()):
            self._admin.set_status(kind, item, status)

    def _apply_kueue_workload(self, workload: Json) -> None:
        """Suspend or resume a queued job, as Kueue does whatever else the job's spec says."""
        owner = workload["metadata"]["ownerReferences"][0]
        kind = find_kind_of(owner["apiVersion"], owner["kind"])
        assert kind is not None
        job = self._admin.get(kind, workload["metadata"]["namespace"], owner["name"])
        suspended = workload["spec"].get("active", True) is False
        if job is not None and bool(at(job, *kind.suspend_field)) is not suspended:
            self._admin.patch(kind, job, set_field(kind.suspend_field, suspended))

    def _list_owned(self, kind: Kind, item: Json) -> list[Json]:
        items = self._admin.list(kind, item["metadata"]["namespace"])
        uid = item["metadata"]["uid"]
        return [
            child
            for child in items
            if any(owner["uid"] == uid for owner in child["metadata"].get("ownerReferences", []))
        ]


def _permits_suspend(ray_job: Json) -> bool:
    """Whether KubeRay suspends it; if not it ignores the object from then on."""
    return at(ray_job, "spec", "shutdownAfterJobFinishes") is True and not at(ray_job, "spec", "clusterSelector")


def _list_child_kinds(kind: Kind) -> tuple[Kind, ...]:
    return {JOBSET: (JOB,), TRAIN_JOB: (JOBSET,), RAY_JOB: (RAY_CLUSTER,), MPI_JOB: (POD, JOB)}.get(kind, (POD,))


def _make_children(kind: Kind, item: Json) -> list[Json]:
    """What a controller creates for a workload; here each has a pod template in spec.template."""
    name, uid = item["metadata"]["name"], item["metadata"]["uid"]
    template = item["spec"]["template"]
    jobset = {"jobset.sigs.k8s.io/jobset-name": name}
    kubeflow = {"training.kubeflow.org/job-name": name}
    if kind is JOB:
        labels = template["metadata"].get("labels", {})
        return [
            _make_pod(kind, item, f"{name}-{uid[:5]}-{index}", labels) for index in range(item["spec"]["parallelism"])
        ]
    if kind is JOBSET:
        return [_make_job(kind, item, f"{name}-workers-0", jobset)]
    if kind is TRAIN_JOB:
        return [_make_child(kind, item, JOBSET, name, {}, {"template": template})]
    if kind is RAY_JOB:
        return [_make_child(kind, item, RAY_CLUSTER, item["status"]["rayClusterName"], {}, {"template": template})]
    if kind is MPI_JOB:
        return [
            _make_job(kind, item, f"{name}-launcher", kubeflow),
            _make_pod(kind, item, f"{name}-worker-0", kubeflow),
        ]
    pod_labels = {
        PYTORCH_JOB: kubeflow,
        RAY_CLUSTER: {"ray.io/cluster": name},
    }
    return [_make_pod(kind, item, f"{name}-{index}", pod_labels[kind]) for index in range(2)]


def _make_job(owner_kind: Kind, owner: Json, name: str, labels: Json) -> Json:
    template = {**owner["spec"]["template"], "metadata": {"labels": labels}}
    return _make_child(owner_kind, owner, JOB, name, labels, {"backoffLimit": 0, "template": template})


def _make_pod(owner_kind: Kind, owner: Json, name: str, labels: Json) -> Json:
    return _make_child(owner_kind, owner, POD, name, labels, owner["spec"]["template"]["spec"])


def _make_child(owner_kind: Kind, owner: Json, kind: Kind, name: str, labels: Json, spec: Any) -> Json:
    reference = {
        "apiVersion": api_version(owner_kind),
        "kind": owner_kind.name,
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }
    metadata = {"name": name, "labels": labels, "ownerReferences": [reference]}
    return {"apiVersion": api_version(kind), "kind": kind.name, "metadata": metadata, "spec": spec}


def _find_kind(item: Json) -> Kind:
    kind = find_kind_of(item["apiVersion"], item["kind"])
    assert kind is not None
    return kind
