"""The kinds of workload that can be stopped: how each is suspended, how its pods are selected, and its states.

The suspend flag is not enough: only the controller's status shows that it has noticed and creates no more pods.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Object = Mapping[str, Any]


@dataclass(frozen=True)
class Kind:
    """`suspend_field`: the field that suspends it, empty if a command does. `pods`: a selector template for `selector`.

    `phase`: the status field with its state; without one, its conditions are its states.
    `owns_pods`: its pods name it as their controller, so that its name need not be trusted.
    """

    name: str
    group: str
    resource: str
    pods: str
    ended: frozenset[str]
    suspended: frozenset[str] = frozenset({"Suspended"})
    suspend_field: tuple[str, ...] = ("spec", "suspend")
    phase: tuple[str, ...] = ()
    owns_pods: bool = False
    owns_selector: bool = False

    def __str__(self) -> str:
        return self.name if self.group in ("", "batch") else f"{self.name}.{self.group}"

    def selector(self, workload: Object) -> str:
        """The selector of the pods of a workload: a Job's own one, which `manualSelector` may have set."""
        if own := at(workload, "spec", "selector") if self.owns_selector else None:
            return _format_selector(own)
        metadata = workload["metadata"]
        cluster = at(workload, "status", "rayClusterName") or metadata["name"]
        return self.pods.format(name=metadata["name"], uid=metadata["uid"], ray_cluster=cluster)

    def list_states(self, workload: Object) -> frozenset[str]:
        """The states that its controller reports."""
        if self.phase:
            phase = at(workload, *self.phase)
            return frozenset({phase}) if isinstance(phase, str) else frozenset()
        conditions = at(workload, "status", "conditions") or []
        return frozenset(condition["type"] for condition in conditions if condition.get("status") == "True")


JOBSET_PODS = "jobset.sigs.k8s.io/jobset-name={name}"
KUBEFLOW_PODS = "training.kubeflow.org/job-name={name}"
KUBEFLOW_SUSPEND = ("spec", "runPolicy", "suspend")

POD = Kind("Pod", "", "pods", "", frozenset(), suspend_field=())
"""A run may name a pod; its topmost workload is stopped instead."""

EVENT = Kind("Event", "", "events", "", frozenset(), suspend_field=())
"""An event of an object, as shown by `kubectl describe`."""

JOB = Kind(
    "Job",
    "batch",
    "jobs",
    "controller-uid={uid}",
    frozenset({"Complete", "Failed"}),
    owns_pods=True,
    owns_selector=True,
)
JOBSET = Kind("JobSet", "jobset.x-k8s.io", "jobsets", JOBSET_PODS, frozenset({"Completed", "Failed"}))
TRAIN_JOB = Kind("TrainJob", "trainer.kubeflow.org", "trainjobs", JOBSET_PODS, frozenset({"Complete", "Failed"}))
PYTORCH_JOB = Kind(
    "PyTorchJob",
    "kubeflow.org",
    "pytorchjobs",
    KUBEFLOW_PODS,
    frozenset({"Succeeded", "Failed"}),
    suspend_field=KUBEFLOW_SUSPEND,
    owns_pods=True,
)
MPI_JOB = Kind(
    "MPIJob",
    "kubeflow.org",
    "mpijobs",
    KUBEFLOW_PODS,
    frozenset({"Succeeded", "Failed"}),
    suspend_field=KUBEFLOW_SUSPEND,  # not owns_pods: later versions have a batch/v1 Job as launcher, which owns a pod
)
RAY_JOB = Kind(
    "RayJob",
    "ray.io",
    "rayjobs",
    "ray.io/cluster={ray_cluster}",  # named by the status while there is one: suspending deletes the RayCluster
    frozenset({"Complete", "Failed"}),
    phase=("status", "jobDeploymentStatus"),
)
RAY_CLUSTER = Kind(
    "RayCluster",
    "ray.io",
    "rayclusters",
    "ray.io/cluster={name}",
    frozenset(),
    suspended=frozenset({"suspended"}),
    phase=("status", "state"),
    owns_pods=True,
)
VOLCANO_JOB = Kind(
    "Job",
    "batch.volcano.sh",
    "jobs",
    "volcano.sh/job-name={name}",
    frozenset({"Completed", "Failed", "Terminated"}),
    suspended=frozenset({"Aborted"}),
    suspend_field=(),
    phase=("status", "state", "phase"),
    owns_pods=True,
)
KINDS = (JOB, JOBSET, TRAIN_JOB, PYTORCH_JOB, MPI_JOB, RAY_JOB, RAY_CLUSTER, VOLCANO_JOB)

WORKLOAD = Kind("Workload", "kueue.x-k8s.io", "workloads", "", frozenset(), suspend_field=("spec", "active"))
"""Kueue's object for a workload: while it exists, Kueue resumes a workload that others suspend."""

COMMAND = Kind("Command", "bus.volcano.sh", "commands", "", frozenset(), suspend_field=())
"""A command for Volcano to act on a job."""


def find_kind(text: str) -> Kind | None:
    """Find a kind by name, with its group after a dot for Volcano's Job."""
    name, _, group = text.partition(".")
    return next((kind for kind in (*KINDS, POD) if name == kind.name and group in _groups(kind)), None)


def find_kind_of(api_version: str, name: str) -> Kind | None:
    """The kind that an owner reference names."""
    group = api_version.rpartition("/")[0]
    return next((kind for kind in (*KINDS, POD) if (kind.group, kind.name) == (group, name)), None)


def at(tree: Any, *path: str) -> Any:
    """The value at a path of fields; None when one of them is missing."""
    for name in path:
        tree = tree.get(name) if isinstance(tree, Mapping) else None
    return tree


def find_controller(item: Object) -> Object | None:
    """The reference to the controller of an object."""
    owners = item["metadata"].get("ownerReferences") or []
    return next((reference for reference in owners if reference.get("controller")), None)


def set_field(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """A merge patch that sets one field."""
    change = value
    for name in reversed(path):
        change = {name: change}
    assert isinstance(change, dict)
    return change


def _format_selector(selector: Object) -> str:
    """A selector of the API as a query."""
    terms = [f"{name}={value}" for name, value in (selector.get("matchLabels") or {}).items()]
    for term in selector.get("matchExpressions") or []:
        key, values = term["key"], ",".join(term.get("values") or [])
        formats = {"In": f"{key} in ({values})", "NotIn": f"{key} notin ({values})", "Exists": key}
        terms.append(formats.get(term["operator"], f"!{key}"))
    return ",".join(terms)


def _groups(kind: Kind) -> tuple[str, ...]:
    return (kind.group,) if kind is VOLCANO_JOB else (kind.group, "")
