"""A cluster for tests: an API server, fake or real, with controllers and a node, whose pods are real processes."""

from __future__ import annotations

import itertools
import ssl
import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from evalstop_client.job_identity import scheduler_labels
from evalstop_client.receivers.kubernetes.api import Access, Api
from evalstop_client.receivers.kubernetes.control import KubernetesJobControl
from evalstop_client.receivers.kubernetes.kinds import JOB, JOBSET, KINDS, POD, RAY_JOB, WORKLOAD, Kind, at
from evalstop_client.receivers.stop.job_control import Gone, Job, Present, Unproven

from tests.acceptance.docs.connect_pages import read_block
from tests.clients.programs import wait_until
from tests.clients.receivers.conformance import StartedJob, find_job, make_stop_request, wait_until_gone
from tests.clients.receivers.kubernetes.admin import Admin, Json, make_definitions
from tests.clients.receivers.kubernetes.controllers import Controllers
from tests.clients.receivers.kubernetes.node import Node

ROOT = Path(__file__).parents[4]
NAMESPACE = "research"
RECEIVER = "system:serviceaccount:evalstop:evalstop-receiver"
GRACE_SECONDS = 2

TRAINER = """
import os, pathlib, signal, sys
def end(*_):
    sys.exit(7)
signal.signal(signal.SIGTERM, signal.SIG_IGN if sys.argv[1] == "ignores-sigterm" else end)
pathlib.Path(f"{sys.argv[2]}.{os.getpid()}").touch()
while True:
    signal.pause()
"""


@dataclass(frozen=True)
class ApiServer:
    """An API server: its URL, and the tokens of an administrator and of the receiver."""

    url: str
    admin_token: str
    token: str
    tls: ssl.SSLContext | None = None
    ca_file: Path | None = None
    is_real: bool = False


@dataclass(frozen=True)
class FoundJob:
    """A workload that a receiver's job control has found, and what the receiver does with it."""

    item: Json
    labels: dict[str, str]
    job_control: KubernetesJobControl
    found: Job

    def find(self) -> Job | None:
        return self.job_control.find_job(make_stop_request(self.labels))

    def cancel(self, decision_id: str = "decision-1") -> None:
        self.job_control.cancel_job(self.found, make_stop_request(self.labels, decision_id))

    def kill(self) -> None:
        self.job_control.kill_job(self.found)

    def check(self) -> Present | Gone | Unproven:
        return self.job_control.check_job(self.found)

    def wait_until_gone(self) -> Gone:
        return wait_until_gone(self.job_control, self.found)

    def resume(self) -> None:
        self.job_control.resume_job(self.found)


@dataclass
class KubernetesCluster:
    """A cluster in which workloads run."""

    server: ApiServer
    admin: Admin
    node: Node
    folder: Path
    apis: list[Api] = field(default_factory=list)
    granted: list[str] = field(default_factory=list)
    names: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def kind(self) -> Kind:
        """A kind that can be suspended here: Kubernetes 1.20, which the real server is of, cannot suspend a Job."""
        return JOBSET if self.server.is_real else JOB

    def connect(self, token: str | None = None) -> Api:
        """The API with the receiver's token, or another one."""
        api = Api(Access(self.server.url, NAMESPACE, lambda: token or self.server.token, self.server.tls))
        self.apis.append(api)
        return api

    def job_control(self, **options: Any) -> KubernetesJobControl:
        """A receiver's job control."""
        return KubernetesJobControl(self.connect(), **{"namespaces": frozenset({NAMESPACE}), **options})

    def grant_verbs(self, group: str, resource: str, *verbs: str, everywhere: bool = False) -> None:
        """Grant the receiver verbs beyond the manifest of deploy/, in one namespace or in all."""
        role, binding = load_manifest("kubernetes/receiver-role.yaml")[:2]
        scope, metadata = "Cluster" if everywhere else "", {"name": f"more-{uuid.uuid4()}"}
        metadata |= {} if everywhere else {"namespace": NAMESPACE}
        rules = [{"apiGroups": [group], "resources": [resource], "verbs": list(verbs)}]
        self.admin.apply({**role, "kind": f"{scope}Role", "metadata": metadata, "rules": rules})
        reference = {**binding["roleRef"], "kind": f"{scope}Role", "name": metadata["name"]}
        self.admin.apply({**binding, "kind": f"{scope}RoleBinding", "metadata": metadata, "roleRef": reference})
        where = "clusterrolebindings" if everywhere else f"namespaces/{NAMESPACE}/rolebindings"
        self.granted.append(f"{where}/{metadata['name']}")

    def start_workload(
        self, kind: Kind = JOB, *, ignores_sigterm: bool = False, command: list[str] | None = None, **spec: Any
    ) -> Json:
        """Create a workload and wait until its pods run; with `ignores_sigterm` they ignore SIGTERM."""
        name = f"train-{next(self.names)}"
        trainer = [
            sys.executable,
            "-c",
            TRAINER,
            "ignores-sigterm" if ignores_sigterm else "",
            str(self.folder / name),
        ]
        item = self.create_workload(name, command or trainer, kind, **spec)
        wait_until(lambda: self.is_running(name))
        if command is None:
            wait_until(lambda: len(list(self.folder.glob(f"{name}.*"))) >= len(self.list_pods(name)))
        if kind is RAY_JOB:
            wait_until(lambda: at(self.read_object(kind, item), "status", "rayClusterName"))
        return item

    def create_workload(
        self,
        name: str,
        command: list[str],
        kind: Kind = JOB,
        *,
        variables: Mapping[str, str] | None = None,
        grace_seconds: int = GRACE_SECONDS,
        **spec: Any,
    ) -> Json:
        """Create a workload whose pods request a GPU each."""
        environment = [
            *load_pod_environment(kind),
            *({"name": key, "value": value} for key, value in (variables or {}).items()),
        ]
        container: Json = {"name": "trainer", "image": "none", "command": command, "env": environment}
        container["resources"] = {"limits": {"nvidia.com/gpu": "1"}}
        pod = {"restartPolicy": "Never", "terminationGracePeriodSeconds": grace_seconds, "containers": [container]}
        job_spec: Json = {"backoffLimit": 0} if kind is JOB else {}
        job_spec["template"] = {"metadata": {"labels": {"app": name}}, "spec": pod}
        return self.admin.create(kind, NAMESPACE, {"metadata": {"name": name}, "spec": {**job_spec, **spec}})

    def get_run_labels(self, item: Json) -> dict[str, str]:
        """The labels that the run's client in the workload's first running pod sends."""
        (pod, *_) = [pod for pod in self.list_pods(item["metadata"]["name"]) if at(pod, "status", "phase") == "Running"]
        values = {}
        for variable in pod["spec"]["containers"][0]["env"]:
            path = at(variable, "valueFrom", "fieldRef", "fieldPath")
            label = path.removeprefix("metadata.labels['").removesuffix("']") if path else ""
            pod_label = pod["metadata"]["labels"].get(label) if path and "labels" in path else None
            values[variable["name"]] = variable.get("value") or pod_label or at(pod, *path.split("."))
        return scheduler_labels(values)

    def find_job(self, item: Json, **options: Any) -> FoundJob:
        """The job that a receiver with these options finds by the labels of the workload's run."""
        labels, job_control = self.get_run_labels(item), self.job_control(**options)
        return FoundJob(item, labels, job_control, find_job(job_control, labels))

    def list_pods(self, name: str) -> list[Json]:
        """The pods of a workload, by name."""
        return [pod for pod in self.admin.list(POD, NAMESPACE) if pod["metadata"]["name"].startswith(f"{name}-")]

    def is_running(self, name: str) -> bool:
        """Whether a workload has pods, and all of them run."""
        pods = self.list_pods(name)
        return bool(pods) and all(at(pod, "status", "phase") == "Running" for pod in pods)

    def read_object(self, kind: Kind, item: Json) -> Json:
        """A workload as it is now."""
        current = self.admin.get(kind, NAMESPACE, item["metadata"]["name"])
        assert current is not None
        return current

    def add_to_kueue(self, kind: Kind, item: Json, *, has_label: bool = True) -> Json:
        """Put a workload into a Kueue queue, admitted."""
        metadata = item["metadata"]
        owner = {
            "apiVersion": item["apiVersion"],
            "kind": item["kind"],
            "name": metadata["name"],
            "uid": metadata["uid"],
        }
        workload = {
            "metadata": {
                "name": f"job-{metadata['name']}-1a2b3",
                "labels": {"kueue.x-k8s.io/job-uid": metadata["uid"]},
                "ownerReferences": [{**owner, "controller": True}],
            },
            "spec": {"active": True, "queueName": "gpus"},
        }
        if has_label:
            self.admin.patch(kind, item, {"metadata": {"labels": {"kueue.x-k8s.io/queue-name": "gpus"}}})
        return self.admin.create(WORKLOAD, NAMESPACE, workload)

    def delete_everything(self) -> None:
        """Delete everything, and wait until it is gone."""
        self.node.lost = False
        for binding in self.granted:
            self.admin.http.delete(f"/apis/rbac.authorization.k8s.io/v1/{binding}")
        for kind in (*KINDS, WORKLOAD):
            for item in self.admin.list(kind, NAMESPACE):
                self.admin.delete(kind, item, propagationPolicy="Background")
        wait_until(lambda: not any(self.admin.list(kind, NAMESPACE) for kind in (*KINDS, WORKLOAD)))
        for pod in self.admin.list(POD, NAMESPACE):
            self.admin.delete(POD, pod, gracePeriodSeconds=0)
        wait_until(lambda: self.admin.list(POD, NAMESPACE) == [])


@cache
def load_pod_environment(kind: Kind) -> list[Json]:
    """The environment of a pod's template by which the client identifies the workload, from the docs."""
    return list(yaml.safe_load(read_block("pods of jobs" if kind is JOB else "other pods"))["env"])


@dataclass
class KubernetesLauncher:
    """Starts workloads of one kind for the conformance suite."""

    kubernetes: KubernetesCluster
    kind: Kind = JOB
    is_queued: bool = False

    def start(self, ignores_sigterm: bool = False) -> StartedJob:
        item = self.kubernetes.start_workload(self.kind, ignores_sigterm=ignores_sigterm)
        if self.is_queued:
            self.kubernetes.add_to_kueue(self.kind, item)
        return StartedJob(self.kubernetes.job_control(), self.kubernetes.get_run_labels(item))


@cache
def load_manifest(name: str) -> list[Json]:
    """The objects of a manifest of deploy/."""
    return [item for item in yaml.safe_load_all((ROOT / "deploy" / name).read_text()) if item]


@contextmanager
def running_cluster(server: ApiServer, folder: Path) -> Iterator[KubernetesCluster]:
    """A cluster with all kinds defined, and the receiver's permissions of deploy/."""
    with closing(Admin(server.url, server.admin_token, server.tls)) as admin:
        yield from _run_cluster(server, admin, folder)


def _run_cluster(server: ApiServer, admin: Admin, folder: Path) -> Iterator[KubernetesCluster]:
    for definition in make_definitions():
        admin.apply(definition)
    for name in ("default", NAMESPACE, "evalstop"):
        admin.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    for item in load_manifest("kubernetes/receiver-role.yaml"):
        admin.apply(item)
    with Controllers(admin, runs_jobs=not server.is_real), Node(admin) as node:
        kubernetes = KubernetesCluster(server, admin, node, folder)
        try:
            yield kubernetes
        finally:
            for api in kubernetes.apis:
                api.close()
            if server.is_real:
                kubernetes.delete_everything()
