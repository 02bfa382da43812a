"""KubernetesJobControl on a fake API server: every kind, label checks, refusals and reports."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import yaml
from evalstop_client.errors import RequestRefused
from evalstop_client.receivers import ForeignJob, Gone, Job, Present
from evalstop_client.receivers.kubernetes.kinds import (
    EVENT,
    JOB,
    JOBSET,
    KINDS,
    POD,
    PYTORCH_JOB,
    RAY_JOB,
    TRAIN_JOB,
    VOLCANO_JOB,
    WORKLOAD,
    Kind,
    at,
    change_at,
)

from tests.acceptance.docs.connect_pages import read_block
from tests.clients.programs import wait_until
from tests.clients.receivers.conformance import (
    find_job,
    make_stop_request,
    wait_until_gone,
    wait_until_parked,
)
from tests.clients.receivers.kubernetes.admin import Json
from tests.clients.receivers.kubernetes.cluster import NAMESPACE, KubernetesCluster, pod_environment
from tests.clients.receivers.kubernetes.fake_cluster import FakeCluster

OLD = pytest.mark.parametrize("cluster", [False], indirect=True, ids=["old"])


@pytest.fixture
def cluster(request: pytest.FixtureRequest, cluster: FakeCluster) -> FakeCluster:
    """A server as old as the test wants it."""
    return FakeCluster(tokens=cluster.tokens, knows_suspend=getattr(request, "param", True))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_kind_is_found_from_below_ended_and_let_go_on(kubernetes: KubernetesCluster, kind: Kind) -> None:
    """A pod names itself; the topmost workload is stopped, all its pods end, it goes on when the stop is undone."""
    item = kubernetes.start(kind)
    job_control, labels = kubernetes.job_control(), kubernetes.labels(item)
    job = find_job(job_control, labels)
    assert (job.facts["kind"], job.facts["uid"]) == (str(kind), item["metadata"]["uid"])
    before = kubernetes.pods(item["metadata"]["name"])
    assert isinstance(job_control.check_job(job), Present)
    job_control.cancel_job(job, make_stop_request(labels))
    end = wait_until_gone(job_control, job)
    assert end.state == "Suspended"
    assert end.details["gpus_freed"] == len(before)
    assert kubernetes.node.running() == 0
    job_control.resume_job(job)
    wait_until(
        lambda: any(at(pod, "status", "phase") == "Running" for pod in kubernetes.pods(item["metadata"]["name"]))
    )
    assert isinstance(job_control.check_job(job), Present)


def test_a_workload_is_told_why_it_was_stopped(kubernetes: KubernetesCluster) -> None:
    """An event of the workload holds the reason and the run's page, once; a receiver that may write none stops all the
    same."""
    item = kubernetes.start()
    job_control, labels = kubernetes.job_control(), kubernetes.labels(item)
    job, stop = find_job(job_control, labels), make_stop_request(labels, "decision-7")
    stop = replace(stop, reason="3 declines\nin a row", event={"url": "https://evalstop.example/runs/1"})
    for _ in range(2):
        job_control.cancel_job(job, stop)
    wait_until_gone(job_control, job)
    (event,) = [one for one in kubernetes.admin.list(EVENT, NAMESPACE) if "decision-7" in one["metadata"]["name"]]
    assert event["involvedObject"]["uid"] == item["metadata"]["uid"]
    reason = "stopped by EvalStop: 3 declines in a row; decision decision-7; https://evalstop.example/runs/1"
    assert (event["reason"], event["message"]) == ("StoppedByEvalStop", reason)


@pytest.mark.parametrize("kind", [JOB, JOBSET, PYTORCH_JOB, RAY_JOB], ids=str)
def test_kueue_is_asked_where_it_rules(kubernetes: KubernetesCluster, kind: Kind) -> None:
    """Its Workload is made inactive, for it resumes whatever else is suspended; undo makes it active again."""
    item = kubernetes.start(kind)
    workload = kubernetes.queue(kind, item)
    job_control, labels = kubernetes.job_control(), kubernetes.labels(item)
    job = find_job(job_control, labels)
    job_control.cancel_job(job, make_stop_request(labels, "decision-9"))
    assert wait_until_gone(job_control, job).state == "Suspended"
    now = kubernetes.now(WORKLOAD, workload)
    assert now["spec"]["active"] is False
    assert now["metadata"]["annotations"] == {"evalstop.io/decision": "decision-9"}
    job_control.resume_job(job)
    wait_until(lambda: at(kubernetes.now(kind, item), *kind.lever) is False)
    assert kubernetes.now(WORKLOAD, workload)["spec"]["active"] is True


def test_job_that_waits_in_the_queue_is_not_gone(kubernetes: KubernetesCluster) -> None:
    """Suspended by Kueue and without a pod, it will get some: that is no end."""
    item = kubernetes.start()
    kubernetes.queue(JOB, item)
    job_control = kubernetes.job_control()
    job = find_job(job_control, kubernetes.labels(item))
    workload = kubernetes.admin.list(WORKLOAD, NAMESPACE)[0]
    kubernetes.admin.patch(WORKLOAD, workload, {"spec": {"active": False}})
    assert wait_until_gone(job_control, job)
    kubernetes.admin.patch(WORKLOAD, workload, {"spec": {"active": True}})
    assert isinstance(job_control.check_job(job), Present)


def test_report_tells_what_kubernetes_tells(kubernetes: KubernetesCluster) -> None:
    """How each pod ended, when, where, and the GPUs that are free now, though the pod itself no longer exists."""
    item = kubernetes.start()
    job_control, labels = kubernetes.job_control(), kubernetes.labels(item)
    job = find_job(job_control, labels)
    job_control.cancel_job(job, make_stop_request(labels, "decision-9"))
    while isinstance(end := job_control.check_job(job), Present):
        pass
    assert end.details.items() >= {"scheduler_state": "Suspended", "gpus_freed": 1, "exit_code": 7}.items()
    assert end.details["ended_at"].endswith("Z")
    (pod,) = end.details["pods"]
    assert pod["ends"] == [{"container": "trainer", "exit_code": 7, "reason": "Error"}]
    assert (pod["node"], kubernetes.pods(item["metadata"]["name"])) == ("node-1", [])
    assert kubernetes.now(JOB, item)["metadata"]["annotations"]["evalstop.io/decision"] == "decision-9"


def test_job_that_ended_by_itself_is_gone_in_its_own_words(kubernetes: KubernetesCluster) -> None:
    """Nothing is suspended then, and nothing can be undone."""
    item = kubernetes.start(command=[sys.executable, "-c", "import time; time.sleep(0.3)"])
    job_control, labels = kubernetes.job_control(), kubernetes.labels(item)
    job = find_job(job_control, labels)
    end = wait_until_gone(job_control, job)
    assert (end.state, end.details["exit_code"]) == ("Complete", 0)
    job_control.cancel_job(job, make_stop_request(labels))
    assert kubernetes.now(JOB, item)["spec"].get("suspend") is not True
    with pytest.raises(RequestRefused, match="ended"):
        job_control.resume_job(job)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kubernetes_uid": "0199aa0f-55aa-7c01-b1c2-0f1e2d3c4b5a"}, "another one of the same name"),
        ({"kubernetes_uid": ""}, "kubernetes_uid"),
        ({"kubernetes_name": "no-such-job"}, "there is no Job no-such-job"),
        ({"kubernetes_name": "../../secrets/key"}, "kubernetes_name"),
        ({"kubernetes_name": "train-1?x=y"}, "kubernetes_name"),
        ({"kubernetes_namespace": "kube-system"}, "allow-list"),
        ({"kubernetes_namespace": ""}, "kubernetes_namespace"),
        ({"kubernetes_kind": "Deployment"}, "PyTorchJob"),
        ({"kubernetes_kind": "Job.batch.volcano.sh"}, "there is no Job.batch.volcano.sh"),
    ],
)
def test_labels_that_lead_elsewhere_are_refused(
    kubernetes: KubernetesCluster, change: dict[str, str], words: str
) -> None:
    """Nothing but the very workload of the run is touched, and the person who reads the report learns why."""
    item = kubernetes.start()
    with pytest.raises(RequestRefused, match=words):
        kubernetes.job_control().find_job(make_stop_request({**kubernetes.labels(item), **change}))


def test_runs_of_other_clusters_are_not_ours(kubernetes: KubernetesCluster) -> None:
    """A receiver that has a name for its cluster leaves the runs that say another, or none."""
    labels = kubernetes.labels(kubernetes.start())
    job_control = kubernetes.job_control(cluster="lab-1")
    assert isinstance(job_control.find_job(make_stop_request(labels)), ForeignJob)
    assert isinstance(job_control.find_job(make_stop_request({**labels, "kubernetes_cluster": "lab-2"})), ForeignJob)
    assert isinstance(job_control.find_job(make_stop_request({**labels, "kubernetes_cluster": "lab-1"})), Job)


def test_pod_that_belongs_to_nothing_is_refused(kubernetes: KubernetesCluster) -> None:
    """There is nothing above it that could be suspended."""
    spec = {"restartPolicy": "Never", "containers": [{"name": "a", "image": "none", "command": ["sleep", "60"]}]}
    pod = kubernetes.admin.create(POD, NAMESPACE, {"metadata": {"name": "alone"}, "spec": spec})
    labels = {"kubernetes_namespace": NAMESPACE, "kubernetes_kind": "Pod", "kubernetes_name": "alone"}
    with pytest.raises(RequestRefused, match="belongs to no workload"):
        kubernetes.job_control().find_job(make_stop_request({**labels, "kubernetes_uid": pod["metadata"]["uid"]}))


@pytest.mark.parametrize("kind", [JOB, TRAIN_JOB], ids=str)
def test_another_of_the_same_name_is_left_alone(kubernetes: KubernetesCluster, kind: Kind) -> None:
    """Deleted and made anew in the middle of a stop: the old one is gone, the new one is neither stopped nor forced."""
    item = kubernetes.start(kind)
    job_control, labels = kubernetes.job_control(), kubernetes.labels(item)
    job = find_job(job_control, labels)
    assert isinstance(job_control.check_job(job), Present)
    kubernetes.admin.delete(kind, item, propagationPolicy="Background")
    wait_until(lambda: kubernetes.pods(item["metadata"]["name"]) == [])
    spec = {name: value for name, value in item["spec"].items() if name != "selector"}
    spec["template"] = {"metadata": {}, "spec": item["spec"]["template"]["spec"]}
    anew = kubernetes.admin.create(kind, NAMESPACE, {"metadata": {"name": item["metadata"]["name"]}, "spec": spec})
    wait_until(
        lambda: any(at(pod, "status", "phase") == "Running" for pod in kubernetes.pods(item["metadata"]["name"]))
    )
    job_control.cancel_job(job, make_stop_request(labels))
    job_control.kill_job(job)
    assert wait_until_gone(job_control, job).state == "Deleted"
    with pytest.raises(RequestRefused, match="no longer exists"):
        job_control.resume_job(job)
    assert at(kubernetes.now(kind, anew), *kind.lever) is not True
    assert kubernetes.node.running() == 1


@OLD
def test_field_that_the_server_drops_is_no_success(kubernetes: KubernetesCluster) -> None:
    """Before Kubernetes 1.21 a Job cannot be suspended: it gets no pods instead, is deleted, or the stop is refused."""
    item = kubernetes.start(parallelism=2)
    labels = kubernetes.labels(item)
    job_control = kubernetes.job_control(instead="refuse")
    job = find_job(job_control, labels)
    with pytest.raises(RequestRefused, match=r"accepted spec\.suspend of Job train-1 but dropped it"):
        job_control.cancel_job(job, make_stop_request(labels))
    job_control = kubernetes.job_control()
    for _ in range(2):
        job_control.cancel_job(job, make_stop_request(labels))
    assert wait_until_gone(job_control, job).state == "Suspended"
    job_control.resume_job(job)
    now = kubernetes.now(JOB, item)
    assert (now["spec"]["parallelism"], now["metadata"]["annotations"]) == (2, {})
    kubernetes.grant("batch", "jobs", "delete")
    job_control = kubernetes.job_control(instead="delete")
    job_control.cancel_job(job, make_stop_request(labels))
    assert wait_until_gone(job_control, job).state == "Deleted"


def test_kind_whose_definition_lacks_the_field_is_refused(kubernetes: KubernetesCluster, cluster: FakeCluster) -> None:
    """An operator too old to know spec.suspend: it is said, not believed."""
    item = kubernetes.start(JOBSET)
    (resource,) = [one for one in cluster.resources if one.kind == "JobSet"]
    resource.fields = frozenset({"template"})
    job_control, labels = kubernetes.job_control(), kubernetes.labels(item)
    job = find_job(job_control, labels)
    with pytest.raises(RequestRefused, match="cannot suspend it"):
        job_control.cancel_job(job, make_stop_request(labels))


def test_pods_of_a_lost_node_are_deleted_for_good_once_their_grace_is_over(kubernetes: KubernetesCluster) -> None:
    """Not before: the grace is the pod's. What is deleted for good is reported without an exit code."""
    item = kubernetes.start()
    job_control, labels = kubernetes.job_control(), kubernetes.labels(item)
    job = find_job(job_control, labels)
    kubernetes.node.lost = True
    job_control.cancel_job(job, make_stop_request(labels))
    (pod,) = wait_until(lambda: [one for one in kubernetes.pods("train-1") if one["metadata"].get("deletionTimestamp")])
    job_control.kill_job(job)
    assert [one["metadata"]["uid"] for one in kubernetes.pods("train-1")] == [pod["metadata"]["uid"]]
    assert isinstance(job_control.check_job(job), Present)

    def forced() -> bool:
        job_control.kill_job(job)
        return kubernetes.pods("train-1") == []

    wait_until(forced)
    end = wait_until_gone(job_control, job)
    assert (end.state, end.details["exit_code"]) == ("Suspended", None)


def test_force_deletes_what_nobody_has_deleted(kubernetes: KubernetesCluster) -> None:
    """A controller that is down leaves the pods: they are deleted with their own grace, and end."""
    item = kubernetes.start(VOLCANO_JOB)
    job_control, labels = kubernetes.job_control(), kubernetes.labels(item)
    job = find_job(job_control, labels)
    kubernetes.admin.status(VOLCANO_JOB, item, {"state": {"phase": "Completed"}})  # its controller looks no more at it
    job_control.kill_job(job)
    assert wait_until_gone(job_control, job).details["exit_code"] == 7


@pytest.mark.parametrize(("label", "asked"), [("annotation", True), ("none", False), ("", False)])
def test_pods_are_annotated_where_somebody_wants_it(kubernetes: KubernetesCluster, label: str, asked: bool) -> None:
    """By the run's own label, or by the receiver's option where the run says nothing."""
    item = kubernetes.start()
    labels = {**kubernetes.labels(item), "checkpoint_signal": label}
    job_control = kubernetes.job_control(annotates=False)
    assert job_control.request_checkpoint(find_job(job_control, labels), make_stop_request(labels)) is asked
    assert kubernetes.job_control().request_checkpoint(
        find_job(kubernetes.job_control(), labels), make_stop_request(labels)
    ) is (label != "none")


def test_undo_of_a_deletion_is_refused(kubernetes: KubernetesCluster) -> None:
    """What was deleted cannot be resumed, and it is said how to have it otherwise."""
    item, job_control = kubernetes.start(), kubernetes.job_control()
    job = find_job(job_control, kubernetes.labels(item))
    kubernetes.admin.delete(JOB, item)
    wait_until_gone(job_control, job)
    with pytest.raises(RequestRefused, match="cannot be resumed"):
        job_control.resume_job(job)


@pytest.mark.parametrize("stop_by", ["suspend", "delete"])
def test_a_parked_workload_is_suspended_and_can_return(kubernetes: KubernetesCluster, stop_by: str) -> None:
    """However stops are carried out: parked it has no pods and is not deleted, resumed it has pods again."""
    item = kubernetes.start(PYTORCH_JOB)
    job_control, labels = kubernetes.job_control(stop_by=stop_by), kubernetes.labels(item)
    job = find_job(job_control, labels)
    job_control.park_job(job, make_stop_request(labels))
    assert wait_until_parked(job_control, job).details["parked_as"] == "suspended"
    job_control.resume_job(job)
    wait_until(lambda: isinstance(job_control.check_parked(job), Present))


def test_workload_that_is_resumed_by_somebody_else_is_there_again(kubernetes: KubernetesCluster) -> None:
    """Suspended a moment ago is not gone: what counts is what is so when it is looked at."""
    item = kubernetes.start(PYTORCH_JOB)
    job_control, labels = kubernetes.job_control(), kubernetes.labels(item)
    job = find_job(job_control, labels)
    job_control.cancel_job(job, make_stop_request(labels))
    assert isinstance(wait_until_gone(job_control, job), Gone)
    kubernetes.admin.patch(PYTORCH_JOB, item, change_at(PYTORCH_JOB.lever, False))
    assert isinstance(job_control.check_job(job), Present)


def test_the_page_shows_what_the_pods_here_have() -> None:
    """The two pieces of a template in docs/kubernetes.md are those by which every workload of these tests is found."""
    shown = [yaml.safe_load(read_block(name))["env"] for name in ("pods of jobs", "other pods")]

    def by_name(variables: list[Json]) -> dict[str, Json]:
        return {one["name"]: one for one in variables}

    assert [by_name(one) for one in shown] == [by_name(pod_environment(kind)) for kind in (JOB, JOBSET)]
