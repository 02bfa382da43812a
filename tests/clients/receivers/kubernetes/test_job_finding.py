"""Which workload and which pods a run's labels name, and which labels are refused, on a fake API server."""

from __future__ import annotations

import pytest
import yaml
from evalstop_client.errors import RequestRefused
from evalstop_client.receivers.kubernetes.kinds import JOB, JOBSET, POD, RAY_JOB
from evalstop_client.receivers.stop.job_control import Job, Present

from tests.acceptance.docs.connect_pages import read_block
from tests.clients.programs import wait_until
from tests.clients.receivers.conformance import find_job, make_stop_request
from tests.clients.receivers.kubernetes.admin import Json
from tests.clients.receivers.kubernetes.cluster import (
    NAMESPACE,
    FoundJob,
    KubernetesCluster,
    load_pod_environment,
)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kubernetes_uid": "0199aa0f-55aa-7c01-b1c2-0f1e2d3c4b5a"}, "another one of the same name"),
        ({"kubernetes_uid": ""}, "kubernetes_uid"),
        ({"kubernetes_name": "no-such-job"}, "there is no Job no-such-job"),
        ({"kubernetes_name": "../../secrets/key"}, "kubernetes_name"),
        ({"kubernetes_name": "train-1?x=y"}, "kubernetes_name"),
        ({"kubernetes_namespace": "kube-system"}, "allow-list"),
        ({"kubernetes_namespace": ""}, "kubernetes_namespace"),
        ({"kubernetes_kind": "Deployment"}, "PyTorchJob"),
    ],
)
def test_labels_of_another_object_are_refused(
    kubernetes: KubernetesCluster, change: dict[str, str], message: str
) -> None:
    """Labels with another uid, name, namespace or kind are refused, and the reason names the label."""
    item = kubernetes.start_workload()
    with pytest.raises(RequestRefused, match=message):
        kubernetes.job_control().find_job(make_stop_request({**kubernetes.get_run_labels(item), **change}))


def test_runs_of_other_clusters_are_foreign(kubernetes: KubernetesCluster) -> None:
    """A receiver with a cluster name ignores runs with another name, or none."""
    labels = kubernetes.get_run_labels(kubernetes.start_workload())
    job_control = kubernetes.job_control(cluster="lab-1")
    assert job_control.find_job(make_stop_request(labels)) is None
    assert job_control.find_job(make_stop_request({**labels, "kubernetes_cluster": "lab-2"})) is None
    assert isinstance(job_control.find_job(make_stop_request({**labels, "kubernetes_cluster": "lab-1"})), Job)


@pytest.mark.parametrize("owner", [None, "StatefulSet", "ReplicaSet"])
def test_pod_of_no_workload_is_refused(kubernetes: KubernetesCluster, owner: str | None) -> None:
    """A pod of nothing, or of what runs forever, cannot be suspended; the refusal says what to do."""
    spec = {"restartPolicy": "Never", "containers": [{"name": "a", "image": "none", "command": ["sleep", "60"]}]}
    existing = kubernetes.admin.create(POD, NAMESPACE, {"metadata": {"name": "trainer"}, "spec": spec})
    uid = existing["metadata"]["uid"]  # of something that exists: pods of what is gone are deleted
    above = {"apiVersion": "apps/v1", "kind": owner, "name": "trainer", "uid": uid, "controller": True}
    metadata = {"name": "alone"} | ({"ownerReferences": [above]} if owner else {})
    pod = kubernetes.admin.create(POD, NAMESPACE, {"metadata": metadata, "spec": spec})
    labels = {"kubernetes_namespace": NAMESPACE, "kubernetes_kind": "Pod", "kubernetes_name": "alone"}
    with pytest.raises(RequestRefused, match=f"controlled by {owner or 'nothing'}.*have the trainer read should_stop"):
        kubernetes.job_control().find_job(make_stop_request({**labels, "kubernetes_uid": pod["metadata"]["uid"]}))


def test_ray_job_in_a_shared_cluster_is_refused(kubernetes: KubernetesCluster) -> None:
    """A RayJob that chose a cluster by `clusterSelector` is refused before anything is touched."""
    item = kubernetes.start_workload(RAY_JOB, clusterSelector={"ray.io/cluster": "shared"})
    labels = kubernetes.get_run_labels(item)
    before = kubernetes.read_object(RAY_JOB, item)
    with pytest.raises(RequestRefused, match=r"clusterSelector.*ray job stop"):
        kubernetes.job_control().find_job(make_stop_request(labels))
    assert kubernetes.read_object(RAY_JOB, item) == before
    assert kubernetes.node.count_running() == 2


@pytest.mark.nightly
def test_job_with_a_selector_of_its_own_has_pods(kubernetes: KubernetesCluster) -> None:
    """The pods of a Job with `manualSelector` lack the usual label; they are waited for, and counted."""
    kubernetes.create_workload(
        "train-1", ["sleep", "60"], manualSelector=True, selector={"matchLabels": {"app": "train-1"}}, parallelism=2
    )
    wait_until(lambda: kubernetes.is_running("train-1"))
    (item,) = kubernetes.admin.list(JOB, NAMESPACE)
    labels = {"kubernetes_namespace": NAMESPACE, "kubernetes_kind": "Job", "kubernetes_name": "train-1"}
    labels["kubernetes_uid"] = item["metadata"]["uid"]
    job_control = kubernetes.job_control()
    job = FoundJob(item, labels, job_control, find_job(job_control, labels))
    job.cancel()
    assert isinstance(job.check(), Present)
    end = job.wait_until_gone()
    assert (end.details["pods_total"], kubernetes.node.count_running()) == (2, 0)


def test_documented_pod_environment_is_what_the_tests_use() -> None:
    """The two templates in docs/kubernetes.md are those by which these tests find workloads."""
    documented = [yaml.safe_load(read_block(name))["env"] for name in ("pods of jobs", "other pods")]

    def by_name(variables: list[Json]) -> dict[str, Json]:
        return {variable["name"]: variable for variable in variables}

    assert [by_name(environment) for environment in documented] == [
        by_name(load_pod_environment(kind)) for kind in (JOB, JOBSET)
    ]
