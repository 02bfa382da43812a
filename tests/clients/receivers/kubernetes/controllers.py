"""Stand-ins for the controllers of a cluster, over HTTP: they make pods, end them when suspended, and say so.

On a real API server Kubernetes' own controller tends batch/v1 Jobs; those of Kueue, JobSet, Kubeflow, KubeRay and
Volcano are stood in for there too.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import httpx
from evalstop_client.receivers.kubernetes.kinds import (
    COMMAND,
    JOB,
    JOBSET,
    KINDS,
    MPI_JOB,
    POD,
    PYTORCH_JOB,
    RAY_CLUSTER,
    RAY_JOB,
    TRAIN_JOB,
    VOLCANO_JOB,
    WORKLOAD,
    Kind,
    at,
    change_at,
    find_kind_of,
)

from tests.clients.receivers.kubernetes.admin import Admin, Json, api_version

PAUSE_SECONDS = 0.03


class Controllers:
    """All of them in one thread; `tends_jobs` where there is no controller of Kubernetes' own."""

    def __init__(self, admin: Admin, tends_jobs: bool) -> None:
        self._admin = admin
        self._kinds = [kind for kind in KINDS if kind is not JOB or tends_jobs]
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Controllers:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.is_set():
            with contextlib.suppress(httpx.HTTPError):  # a server that is down, or somebody else who was quicker
                self._round()
            self._ended.wait(PAUSE_SECONDS)

    def _round(self) -> None:
        for command in self._admin.list(COMMAND):
            self._obey(command)
        for workload in self._admin.list(WORKLOAD):
            self._rule(workload)
        for kind in self._kinds:
            for item in self._admin.list(kind):
                if not item["metadata"].get("deletionTimestamp"):
                    self._tend(kind, item)

    def _tend(self, kind: Kind, item: Json) -> None:
        if kind.list_states(item) & kind.ended:
            return
        children = [(one, child) for one in _children_of(kind) for child in self._owned(one, item)]
        wanted = {} if self._is_suspended(kind, item) else {one["metadata"]["name"]: one for one in _made(kind, item)}
        for one, child in children:
            if child["metadata"]["name"] not in wanted and not child["metadata"].get("deletionTimestamp"):
                self._admin.delete(one, child, propagationPolicy="Background")
        ended = {at(child, "status", "phase") for one, child in children if one is POD} & {"Succeeded", "Failed"}
        if kind is JOB and ended and wanted:
            self._say(kind, item, {"Succeeded": "Complete"}.get(min(ended), "Failed"), len(children))
            return
        for name, child in wanted.items():
            if all(one["metadata"]["name"] != name for _, one in children):
                self._admin.create(_kind(child), item["metadata"]["namespace"], child)
        suspended = not wanted and (kind is not JOB or not children)
        self._say(kind, item, min(kind.suspended) if suspended else "", len(children))

    def _is_suspended(self, kind: Kind, item: Json) -> bool:
        if kind is VOLCANO_JOB:
            return bool(kind.list_states(item) & kind.suspended)
        return at(item, *kind.lever) is True or (kind is JOB and at(item, "spec", "parallelism") == 0)

    def _say(self, kind: Kind, item: Json, word: str, active: int) -> None:
        """What its status says: a phase, or conditions."""
        if kind is JOB and at(item, "spec", "suspend") is not True and word in kind.suspended:
            word = ""
        status: Json = {"active": active} if kind is JOB else {}
        if kind.phase and kind is not VOLCANO_JOB:
            status = {**status, **change_at(kind.phase[1:], word or "Running")}
        elif not kind.phase:
            types = sorted(kind.suspended | ({word} if word else frozenset()))
            status["conditions"] = [{"type": one, "status": "True" if one == word else "False"} for one in types]
            if word == "Failed":
                status["conditions"][types.index(word)]["reason"] = "BackoffLimitExceeded"
        if kind is RAY_JOB:
            status["rayClusterName"] = "" if word else f"{item['metadata']['name']}-cluster"
        if any(at(item, "status", name) != value for name, value in status.items()):
            self._admin.status(kind, item, status)

    def _obey(self, command: Json) -> None:
        """As Volcano does: a command is carried out and deleted."""
        target = command["target"]
        job = self._admin.get(VOLCANO_JOB, command["metadata"]["namespace"], target["name"])
        if job is not None and job["metadata"]["uid"] == target["uid"]:
            phase = {"AbortJob": "Aborted", "ResumeJob": "Running"}[command["action"]]
            self._admin.status(VOLCANO_JOB, job, {"state": {"phase": phase}})
        self._admin.delete(COMMAND, command)

    def _rule(self, workload: Json) -> None:
        """As Kueue does: it is Kueue that suspends and resumes a job in its queue, whatever anybody else wants."""
        owner = workload["metadata"]["ownerReferences"][0]
        kind = find_kind_of(owner["apiVersion"], owner["kind"])
        assert kind is not None
        job = self._admin.get(kind, workload["metadata"]["namespace"], owner["name"])
        suspended = workload["spec"].get("active", True) is False
        if job is not None and bool(at(job, *kind.lever)) is not suspended:
            self._admin.patch(kind, job, change_at(kind.lever, suspended))

    def _owned(self, kind: Kind, item: Json) -> list[Json]:
        found = self._admin.list(kind, item["metadata"]["namespace"])
        uid = item["metadata"]["uid"]
        return [one for one in found if any(o["uid"] == uid for o in one["metadata"].get("ownerReferences", []))]


def _children_of(kind: Kind) -> tuple[Kind, ...]:
    return {JOBSET: (JOB,), TRAIN_JOB: (JOBSET,), RAY_JOB: (RAY_CLUSTER,), MPI_JOB: (POD, JOB)}.get(kind, (POD,))


def _made(kind: Kind, item: Json) -> list[Json]:
    """What a controller makes for a workload; all of them have a pod's template in spec.template here."""
    name, uid = item["metadata"]["name"], item["metadata"]["uid"]
    template = item["spec"]["template"]
    jobset = {"jobset.sigs.k8s.io/jobset-name": name}
    kubeflow = {"training.kubeflow.org/job-name": name}
    if kind is JOB:
        labels = template["metadata"].get("labels", {})
        return [_pod(kind, item, f"{name}-{uid[:5]}-{one}", labels) for one in range(item["spec"]["parallelism"])]
    if kind is JOBSET:
        return [_job(kind, item, f"{name}-workers-0", jobset)]
    if kind is TRAIN_JOB:
        return [_child(kind, item, JOBSET, name, {}, {"template": template})]
    if kind is RAY_JOB:
        return [_child(kind, item, RAY_CLUSTER, f"{name}-cluster", {}, {"template": template})]
    if kind is MPI_JOB:
        return [_job(kind, item, f"{name}-launcher", kubeflow), _pod(kind, item, f"{name}-worker-0", kubeflow)]
    own = {PYTORCH_JOB: kubeflow, RAY_CLUSTER: {"ray.io/cluster": name}, VOLCANO_JOB: {"volcano.sh/job-name": name}}
    return [_pod(kind, item, f"{name}-{one}", own[kind]) for one in range(2)]


def _job(owner_kind: Kind, owner: Json, name: str, labels: Json) -> Json:
    template = {**owner["spec"]["template"], "metadata": {"labels": labels}}
    return _child(owner_kind, owner, JOB, name, labels, {"backoffLimit": 0, "template": template})


def _pod(owner_kind: Kind, owner: Json, name: str, labels: Json) -> Json:
    return _child(owner_kind, owner, POD, name, labels, owner["spec"]["template"]["spec"])


def _child(owner_kind: Kind, owner: Json, kind: Kind, name: str, labels: Json, spec: Any) -> Json:
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


def _kind(item: Json) -> Kind:
    kind = find_kind_of(item["apiVersion"], item["kind"])
    assert kind is not None
    return kind
