"""A whole cluster for tests: an API server, fake or real, controllers, a node, workloads that are real processes."""

from __future__ import annotations

import itertools
import ssl
import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from evalstop_client.receivers.kubernetes.access import Access
from evalstop_client.receivers.kubernetes.api import Api
from evalstop_client.receivers.kubernetes.job_control import KubernetesJobControl
from evalstop_client.receivers.kubernetes.kinds import JOB, KINDS, POD, RAY_JOB, WORKLOAD, Kind, at
from evalstop_client.scheduler_labels import scheduler_labels

from tests.acceptance.docs.connect_pages import read_block
from tests.clients.programs import wait_until
from tests.clients.receivers.conformance import StartedJob
from tests.clients.receivers.kubernetes.admin import Admin, Json, definitions
from tests.clients.receivers.kubernetes.controllers import Controllers
from tests.clients.receivers.kubernetes.node import Node

ROOT = Path(__file__).parents[4]
NAMESPACE = "research"
RECEIVER = "system:serviceaccount:evalstop:evalstop-receiver"
GRACE_SECONDS = 2

TRAINER = """
import os, pathlib, signal, sys, time
folder, ignores_sigterm = pathlib.Path(os.environ["PODINFO"]), sys.argv[1] == "ignores-sigterm"
def end(*_):
    sys.exit(7)
signal.signal(signal.SIGTERM, signal.SIG_IGN if ignores_sigterm else end)
saves, asked = pathlib.Path(sys.argv[2]), None
saves.touch()
pathlib.Path(f"{saves}.{os.getpid()}").touch()
while True:
    lines = (folder / "annotations").read_text().splitlines() if (folder / "annotations").exists() else []
    wish = [line for line in lines if line.startswith("evalstop.io/save-checkpoint=")]
    if wish and wish != asked:
        asked = wish
        with saves.open("a") as file:
            file.write("saved ")
    time.sleep(0.02)
"""


@dataclass(frozen=True)
class Server:
    """An API server: where it is, and the tokens of who may do everything and of the receiver."""

    url: str
    admin_token: str
    token: str
    tls: ssl.SSLContext | None = None
    ca_file: Path | None = None
    is_real: bool = False


@dataclass
class KubernetesCluster:
    """A cluster in which workloads run."""

    server: Server
    admin: Admin
    node: Node
    folder: Path
    apis: list[Api] = field(default_factory=list)
    granted: list[str] = field(default_factory=list)
    names: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def api(self, token: str | None = None) -> Api:
        """The API as the receiver sees it."""
        api = Api(Access(self.server.url, NAMESPACE, lambda: token or self.server.token, self.server.tls))
        self.apis.append(api)
        return api

    def job_control(self, **options: Any) -> KubernetesJobControl:
        """A receiver's job_control."""
        return KubernetesJobControl(self.api(), **{"namespaces": frozenset({NAMESPACE}), "annotates": True, **options})

    def grant(self, group: str, resource: str, *verbs: str) -> None:
        """Let the receiver do more than the manifest of deploy/ lets it."""
        role, binding = manifests("kubernetes/receiver-role.yaml")[:2]
        metadata = {"name": f"more-{uuid.uuid4()}", "namespace": NAMESPACE}
        rules = [{"apiGroups": [group], "resources": [resource], "verbs": list(verbs)}]
        self.admin.apply({**role, "metadata": metadata, "rules": rules})
        reference = {**binding["roleRef"], "name": metadata["name"]}
        self.admin.apply({**binding, "metadata": metadata, "roleRef": reference})
        self.granted.append(metadata["name"])

    def start(
        self, kind: Kind = JOB, *, ignores_sigterm: bool = False, command: list[str] | None = None, **spec: Any
    ) -> Json:
        """A workload whose pods run; one that is `deaf` takes no notice of SIGTERM."""
        number = next(self.names)
        name = f"train-{number}"
        trainer = [
            sys.executable,
            "-c",
            TRAINER,
            "ignores-sigterm" if ignores_sigterm else "",
            str(self.saves_file(number)),
        ]
        item = self.submit(name, command or trainer, kind, **spec)
        wait_until(lambda: self.runs(name))
        if command is None:
            ups = f"{self.saves_file(number).name}.*"
            wait_until(lambda: len(list(self.folder.glob(ups))) >= len(self.pods(name)))
        if kind is RAY_JOB:
            wait_until(lambda: at(self.now(kind, item), "status", "rayClusterName"))
        return item

    def submit(
        self,
        name: str,
        command: list[str],
        kind: Kind = JOB,
        *,
        variables: Mapping[str, str] | None = None,
        grace_seconds: int = GRACE_SECONDS,
        **spec: Any,
    ) -> Json:
        """A workload whose pods want a GPU each, and run when there is one."""
        environment = [*pod_environment(kind), *({"name": one, "value": to} for one, to in (variables or {}).items())]
        container: Json = {"name": "trainer", "image": "none", "command": command, "env": environment}
        container["resources"] = {"limits": {"nvidia.com/gpu": "1"}}
        pod = {"restartPolicy": "Never", "terminationGracePeriodSeconds": grace_seconds, "containers": [container]}
        own: Json = {"backoffLimit": 0} if kind is JOB else {}
        own["template"] = {"metadata": {"labels": {"app": name}}, "spec": pod}
        return self.admin.create(kind, NAMESPACE, {"metadata": {"name": name}, "spec": {**own, **spec}})

    def labels(self, item: Json) -> dict[str, str]:
        """The labels that the client of the run in a workload's first pod sends."""
        (pod, *_) = [one for one in self.pods(item["metadata"]["name"]) if at(one, "status", "phase") == "Running"]
        values = {}
        for one in pod["spec"]["containers"][0]["env"]:
            path = at(one, "valueFrom", "fieldRef", "fieldPath")
            label = path.removeprefix("metadata.labels['").removesuffix("']") if path else ""
            found = pod["metadata"]["labels"].get(label) if path and "labels" in path else None
            values[one["name"]] = one.get("value") or found or at(pod, *path.split("."))
        return scheduler_labels(values)

    def pods(self, name: str) -> list[Json]:
        """The pods of a workload, by their names."""
        return [pod for pod in self.admin.list(POD, NAMESPACE) if pod["metadata"]["name"].startswith(f"{name}-")]

    def runs(self, name: str) -> bool:
        """Whether a workload has pods, and all of them run."""
        pods = self.pods(name)
        return bool(pods) and all(at(pod, "status", "phase") == "Running" for pod in pods)

    def now(self, kind: Kind, item: Json) -> Json:
        """A workload as it is now."""
        found = self.admin.get(kind, NAMESPACE, item["metadata"]["name"])
        assert found is not None
        return found

    def queue(self, kind: Kind, item: Json) -> Json:
        """Put a workload under the rule of Kueue, admitted."""
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
        self.admin.patch(kind, item, {"metadata": {"labels": {"kueue.x-k8s.io/queue-name": "gpus"}}})
        return self.admin.create(WORKLOAD, NAMESPACE, workload)

    def saves_file(self, number: int) -> Path:
        return self.folder / f"saves-{number}"

    def count_saves(self, item: Json) -> int:
        """How often a workload's pods have saved when they were asked."""
        return len(self.saves_file(int(item["metadata"]["name"].partition("-")[2])).read_text().split())

    def clear(self) -> None:
        """End everything, and see that it has."""
        self.node.lost = False
        for name in self.granted:
            self.admin.http.delete(f"/apis/rbac.authorization.k8s.io/v1/namespaces/{NAMESPACE}/rolebindings/{name}")
        for kind in (*KINDS, WORKLOAD):
            for item in self.admin.list(kind, NAMESPACE):
                self.admin.delete(kind, item, propagationPolicy="Background")
        wait_until(lambda: not any(self.admin.list(kind, NAMESPACE) for kind in (*KINDS, WORKLOAD)))
        for pod in self.admin.list(POD, NAMESPACE):
            self.admin.delete(POD, pod, gracePeriodSeconds=0)
        wait_until(lambda: self.admin.list(POD, NAMESPACE) == [])


def pod_environment(kind: Kind) -> list[Json]:
    """What a pod's template has so that the trainer's client can name the workload, as the docs have it."""
    return list(yaml.safe_load(read_block("pods of jobs" if kind is JOB else "other pods"))["env"])


@dataclass
class KubernetesLauncher:
    """Where the battery's jobs are started."""

    world: KubernetesCluster
    kind: Kind = JOB
    options: Mapping[str, Any] = field(default_factory=dict)
    is_queued: bool = False
    item: Json = field(default_factory=dict)

    def start(self, ignores_sigterm: bool = False) -> StartedJob:
        self.item = self.world.start(self.kind, ignores_sigterm=ignores_sigterm)
        if self.is_queued:
            self.world.queue(self.kind, self.item)
        if self.options.get("stop_by") == "delete":
            self.world.grant(self.kind.group, self.kind.resource, "delete")
        return StartedJob(self.world.job_control(**self.options), self.world.labels(self.item))

    def count_saves(self) -> int:
        return min(1, self.world.count_saves(self.item))  # several pods write to one file


def manifests(name: str) -> list[Json]:
    """The objects of a manifest of deploy/."""
    return [one for one in yaml.safe_load_all((ROOT / "deploy" / name).read_text()) if one]


@contextmanager
def world(server: Server, folder: Path) -> Iterator[KubernetesCluster]:
    """A cluster with the kinds defined and the receiver's permissions as deploy/ has them."""
    with closing(Admin(server.url, server.admin_token, server.tls)) as admin:
        yield from _world(server, admin, folder)


def _world(server: Server, admin: Admin, folder: Path) -> Iterator[KubernetesCluster]:
    for definition in definitions():
        admin.apply(definition)
    for name in ("default", NAMESPACE, "evalstop"):
        admin.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    for one in manifests("kubernetes/receiver-role.yaml"):
        admin.apply(one)
    with Controllers(admin, tends_jobs=not server.is_real), Node(admin, folder / "node") as node:
        made = KubernetesCluster(server, admin, node, folder)
        try:
            yield made
        finally:
            for api in made.apis:
                api.close()
            if server.is_real:
                made.clear()
