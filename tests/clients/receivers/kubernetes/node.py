"""A node whose pods are processes, over HTTP: it binds every pod, runs its command, and ends it as a kubelet would.

There are no containers: a pod's first container is a process group, and its downward API is the environment.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime

import httpx
from evalstop_client.receivers.kubernetes.kinds import POD, at
from evalstop_client.receivers.kubernetes.workloads import parse_pod

from tests.clients.receivers.kubernetes.admin import Admin, Json

PAUSE_SECONDS = 0.03
REFERENCE = re.compile(r"\$(?:\$|\((\w+)\))")
LABEL = re.compile(r"metadata\.labels\['(.+)'\]")


@dataclass
class Container:
    """A pod's process. `kill_at`: the end of its grace period, by the node's monotonic clock."""

    process: subprocess.Popen[bytes]
    kill_at: float | None = None
    is_reported_running: bool = False


class Node:
    """A node, and the scheduler of its GPUs. While it is `lost` it does nothing, and its processes continue."""

    name = "node-1"

    def __init__(self, admin: Admin, gpus: int = 64) -> None:
        self._admin = admin
        self.gpus = gpus
        self._containers: dict[str, Container] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.lost = False

    def __enter__(self) -> Node:
        self._admin.apply({"apiVersion": "v1", "kind": "Node", "metadata": {"name": self.name}})
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()
        for container in self._containers.values():
            _send_signal(container, signal.SIGKILL)
            container.process.wait()

    def count_running(self) -> int:
        """How many processes run, whatever the API server says."""
        return sum(container.process.poll() is None for container in self._containers.values())

    def _run(self) -> None:
        while not self._ended.is_set():
            if not self.lost:
                with contextlib.suppress(httpx.HTTPError):  # the server is down
                    self._sync_all()
            self._ended.wait(PAUSE_SECONDS)

    def _sync_all(self) -> None:
        pods = {pod["metadata"]["uid"]: pod for pod in self._admin.list(POD)}
        bound = [pod for pod in pods.values() if pod["spec"].get("nodeName") and parse_pod(pod).holds]
        free = self.gpus - sum(map(_count_gpus, bound))
        for pod in pods.values():
            if not pod["spec"].get("nodeName"):
                wanted = _count_gpus(pod)
                if wanted <= free and not pod["metadata"].get("deletionTimestamp"):
                    self._admin.bind(pod, self.name)
                    free -= wanted
                elif not at(pod, "status", "conditions"):
                    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
                    self._admin.set_status(POD, pod, {"conditions": [condition]})
            elif pod["spec"]["nodeName"] == self.name:
                self._sync(pod)
        for uid in self._containers.keys() - pods.keys():
            _send_signal(self._containers[uid], signal.SIGKILL)  # deleted while the node was lost

    def _sync(self, pod: Json) -> None:
        uid, deleted = pod["metadata"]["uid"], pod["metadata"].get("deletionTimestamp")
        ended = at(pod, "status", "phase") in ("Succeeded", "Failed")
        if uid not in self._containers and not deleted and not ended:
            self._containers[uid] = self._start(pod)
        container = self._containers.get(uid)
        if container is None or ended:
            if deleted:
                self._admin.delete(POD, pod, gracePeriodSeconds=0)
            return
        if container.process.poll() is not None:
            self._report_end(pod, container)
        elif deleted:
            if container.kill_at is None:
                container.kill_at = time.monotonic() + pod["metadata"]["deletionGracePeriodSeconds"]
                _send_signal(container, signal.SIGTERM)
            elif time.monotonic() >= container.kill_at:
                _send_signal(container, signal.SIGKILL)
        elif not container.is_reported_running:
            state = {"running": {"startedAt": _format_now()}}
            self._admin.set_status(POD, pod, {"phase": "Running", "containerStatuses": [_make_status(pod, state)]})
            container.is_reported_running = True

    def _start(self, pod: Json) -> Container:
        first = pod["spec"]["containers"][0]
        variables = {variable["name"]: _read_value(variable, pod) for variable in first.get("env", [])}
        environment = {**os.environ, **variables}
        command = [_expand(word, variables) for word in (*first["command"], *first.get("args", []))]
        process = subprocess.Popen(command, env=environment, start_new_session=True)
        return Container(process)

    def _report_end(self, pod: Json, container: Container) -> None:
        code = container.process.returncode
        code = 128 - code if code < 0 else code
        state = {
            "terminated": {"exitCode": code, "reason": "Error" if code else "Completed", "finishedAt": _format_now()}
        }
        phase = "Failed" if code else "Succeeded"
        self._admin.set_status(POD, pod, {"phase": phase, "containerStatuses": [_make_status(pod, state)]})
        if pod["metadata"].get("deletionTimestamp"):
            self._admin.delete(POD, pod, gracePeriodSeconds=0)


def _expand(text: str, variables: dict[str, str]) -> str:
    """Expand $(NAME) and $$ in a container's command, as Kubernetes does."""
    return REFERENCE.sub(lambda match: "$" if match[1] is None else variables.get(match[1], match[0]), text)


def _make_status(pod: Json, state: Json) -> Json:
    name = pod["spec"]["containers"][0]["name"]
    return {
        "name": name,
        "image": "none",
        "imageID": "",
        "ready": "running" in state,
        "restartCount": 0,
        "state": state,
    }


def _read_value(variable: Json, pod: Json) -> str:
    path = at(variable, "valueFrom", "fieldRef", "fieldPath")
    if path is None:
        return str(variable["value"])
    label = LABEL.fullmatch(path)
    return str(pod["metadata"]["labels"].get(label[1], "") if label else at(pod, *path.split(".")))


def _count_gpus(pod: Json) -> int:
    limits = [at(container, "resources", "limits") or {} for container in pod["spec"]["containers"]]
    return sum(int(limit.get("nvidia.com/gpu", 0)) for limit in limits)


def _send_signal(container: Container, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        if container.process.poll() is None:
            os.killpg(container.process.pid, number)


def _format_now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
