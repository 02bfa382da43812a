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
    """`suspend_field`: the field that suspends it. `pods`: a selector template for `selector`.

    `phase`: the status field with its state; without one, its conditions are its states.
    `owns_pods`: its pods name it as their controller, so that its name need not be trusted.
    """

    name: str
    group: str
    resource: str
    pods: str = ""
    ended: frozenset[str] = frozenset()
    suspended: str = "Suspended"
    suspend_field: tuple[str, ...] = ("spec", "suspend")
    phase: tuple[str, ...] = ()
    owns_pods: bool = False

    def __str__(self) -> str:
        return self.name

    def selector(self, workload: Object) -> str:
        """The selector of the pods of a workload: a Job's own one, which `manualSelector` may have set.

        Its expressions are left out: they exclude no pod that names the Job as its controller.
        """
        if self is JOB and (own := at(workload, "spec", "selector")):
            return ",".join(f"{name}={value}" for name, value in (own.get("matchLabels") or {}).items())
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

POD = Kind("Pod", "", "pods")
"""A run may name a pod; its topmost workload is stopped instead."""

JOB = Kind("Job", "batch", "jobs", "controller-uid={uid}", frozenset({"Complete", "Failed"}), owns_pods=True)
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
    suspended="suspended",
    phase=("status", "state"),
    owns_pods=True,
)
KINDS = (JOB, JOBSET, TRAIN_JOB, PYTORCH_JOB, MPI_JOB, RAY_JOB, RAY_CLUSTER)
BY_NAME = {kind.name: kind for kind in (*KINDS, POD)}
"""What a label may name."""

WORKLOAD = Kind("Workload", "kueue.x-k8s.io", "workloads", suspend_field=("spec", "active"))
"""Kueue's object for a workload: while it exists, Kueue resumes a workload that others suspend."""


def find_kind_of(api_version: str, name: str) -> Kind | None:
    """The kind that an owner reference names."""
    kind = BY_NAME.get(name)
    return kind if kind is not None and kind.group == api_version.rpartition("/")[0] else None


def at(tree: Any, *path: str) -> Any:
    """The value at a path of fields; None when one of them is missing."""
    for name in path:
        tree = tree.get(name) if isinstance(tree, Mapping) else None
    return tree


def list_owners(item: Object) -> list[Object]:
    return list(item["metadata"].get("ownerReferences") or [])


def find_controller(item: Object) -> Object | None:
    """The reference to the controller of an object."""
    return next((owner for owner in list_owners(item) if owner.get("controller")), None)


def set_field(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """A merge patch that sets one field."""
    change = value
    for name in reversed(path):
        change = {name: change}
    assert isinstance(change, dict)
    return change
