"""KubernetesJobControl on a fake API server: every kind, label checks, refusals and reports."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any, ClassVar

import pytest
from evalstop_client.errors import RequestRefused
from evalstop_client.receivers.kubernetes.kinds import (
    JOB,
    JOBSET,
    KINDS,
    PYTORCH_JOB,
    RAY_JOB,
    TRAIN_JOB,
    WORKLOAD,
    Kind,
    at,
    set_field,
)
from evalstop_client.receivers.stop.job_control import Gone, Present, Unproven

from tests.clients.programs import wait_until
from tests.clients.receivers.conformance import Conformance, make_stop_request, wait_until_parked
from tests.clients.receivers.kubernetes.admin import Json
from tests.clients.receivers.kubernetes.cluster import (
    NAMESPACE,
    RECEIVER,
    KubernetesCluster,
    KubernetesLauncher,
)
from tests.clients.receivers.kubernetes.fake_cluster import FakeCluster
from tests.clients.receivers.kubernetes.fake_requests import Request
from tests.clients.receivers.kubernetes.fake_storage import StatusError


@pytest.mark.parametrize(
    "kind",
    [
        JOB,
        PYTORCH_JOB,
        *(pytest.param(kind, marks=pytest.mark.nightly) for kind in KINDS if kind not in (JOB, PYTORCH_JOB)),
    ],
    ids=str,
)
def test_every_kind_is_found_stopped_and_resumed(kubernetes: KubernetesCluster, kind: Kind) -> None:
    """The topmost workload above a pod is found by its labels, loses all its pods when stopped, and can be resumed."""
    stop_and_resume(kubernetes, kind)


def stop_and_resume(kubernetes: KubernetesCluster, kind: Kind) -> None:
    """Find a workload by a pod of its run, stop it, and resume it."""
    job = kubernetes.find_job(kubernetes.start_workload(kind))
    name, uid = job.item["metadata"]["name"], job.item["metadata"]["uid"]
    assert (job.found.facts["kind"], job.found.facts["uid"]) == (str(kind), uid)
    before = kubernetes.list_pods(name)
    assert isinstance(job.check(), Present)
    job.cancel()
    end = job.wait_until_gone()
    assert (end.state, end.details["pods_total"]) == ("Suspended", len(before))
    assert kubernetes.node.count_running() == 0
    job.resume()
    wait_until(lambda: any(at(pod, "status", "phase") == "Running" for pod in kubernetes.list_pods(name)))
    assert isinstance(job.check(), Present)


@pytest.mark.parametrize(
    ("kind", "has_label"),
    [
        (JOB, True),
        (JOB, False),
        *(pytest.param(kind, True, marks=pytest.mark.nightly) for kind in (JOBSET, PYTORCH_JOB, RAY_JOB)),
    ],
    ids=str,
)
def test_queued_workload_is_deactivated_in_kueue(kubernetes: KubernetesCluster, kind: Kind, has_label: bool) -> None:
    """Kueue resumes whatever else is suspended, so its Workload is made inactive, and active again on resume.

    Without a label for its queue too: Kueue can manage such Jobs (`manageJobsWithoutQueueName`).
    """
    spec: dict[str, Any] = {"shutdownAfterJobFinishes": True} if kind is RAY_JOB else {}  # Kueue admits no other RayJob
    item = kubernetes.start_workload(kind, **spec)
    workload = kubernetes.add_to_kueue(kind, item, has_label=has_label)
    job = kubernetes.find_job(item)
    job.cancel("decision-9")
    assert job.wait_until_gone().state == "Suspended"
    current = kubernetes.read_object(WORKLOAD, workload)
    assert current["spec"]["active"] is False
    assert "decision decision-9" in current["metadata"]["annotations"]["evalstop.io/reason"]
    job.resume()
    wait_until(lambda: at(kubernetes.read_object(kind, item), *kind.suspend_field) is False)
    assert kubernetes.read_object(WORKLOAD, workload)["spec"]["active"] is True


@pytest.mark.nightly
def test_job_waiting_in_kueue_is_not_gone(kubernetes: KubernetesCluster) -> None:
    """A job that Kueue has suspended until it is admitted is present, even without pods."""
    item = kubernetes.start_workload()
    workload = kubernetes.add_to_kueue(JOB, item)
    job = kubernetes.find_job(item)
    kubernetes.admin.patch(WORKLOAD, workload, {"spec": {"active": False}})
    job.wait_until_gone()
    kubernetes.admin.patch(WORKLOAD, workload, {"spec": {"active": True}})
    assert isinstance(job.check(), Present)


def test_report_has_the_pods_end(kubernetes: KubernetesCluster) -> None:
    """The report has the exit code of the pods."""
    item = kubernetes.start_workload(command=[sys.executable, "-c", "import time; time.sleep(0.3); exit(7)"])
    end = kubernetes.find_job(item).wait_until_gone()
    assert end.details.items() >= {"scheduler_state": "Failed", "pods_total": 1, "exit_code": 7}.items()


def test_stopped_workload_says_why(kubernetes: KubernetesCluster) -> None:
    """The workload is annotated with the reason, and the run's URL."""
    job = kubernetes.find_job(kubernetes.start_workload(kubernetes.kind))
    stop = make_stop_request(job.labels, "decision-7")
    stop = replace(stop, reason="3 declines\nin a row", event={"url": "https://evalstop.example/runs/1"})
    job.job_control.cancel_job(job.found, stop)
    reason = kubernetes.read_object(kubernetes.kind, job.item)["metadata"]["annotations"]["evalstop.io/reason"]
    assert reason == "stopped by EvalStop: 3 declines in a row; decision decision-7; https://evalstop.example/runs/1"


def test_completed_job_is_gone_and_not_suspended(kubernetes: KubernetesCluster) -> None:
    """A job that completed is gone as Complete, is not suspended by a cancel, and cannot be resumed."""
    item = kubernetes.start_workload(command=[sys.executable, "-c", "import time; time.sleep(0.3)"])
    job = kubernetes.find_job(item)
    end = job.wait_until_gone()
    assert (end.state, end.details["exit_code"]) == ("Complete", 0)
    job.cancel()
    assert kubernetes.read_object(JOB, item)["spec"].get("suspend") is not True
    with pytest.raises(RequestRefused, match="ended"):
        job.resume()


def test_job_that_its_ttl_removed_is_gone_if_it_was_found(kubernetes: KubernetesCluster) -> None:
    """A completed Job that Kubernetes removes before the next check has ended; one never seen is refused."""
    item = kubernetes.start_workload(command=[sys.executable, "-c", "import time; time.sleep(0.3)"])
    job = kubernetes.find_job(item)
    wait_until(lambda: JOB.list_states(kubernetes.read_object(JOB, item)) == {"Complete"})
    kubernetes.admin.delete(JOB, item, propagationPolicy="Background")
    wait_until(lambda: kubernetes.list_pods("train-1") == [])
    end = job.wait_until_gone()
    assert (end.state, kubernetes.node.count_running()) == ("Deleted", 0)
    with pytest.raises(RequestRefused, match="its state is unknown"):
        job.find()


@pytest.mark.parametrize("kind", [JOB, TRAIN_JOB], ids=str)
def test_recreated_workload_is_left_alone(kubernetes: KubernetesCluster, kind: Kind) -> None:
    """A workload deleted and created anew during a stop is gone; the new one is neither stopped nor killed."""
    job = kubernetes.find_job(kubernetes.start_workload(kind))
    assert isinstance(job.check(), Present)
    kubernetes.admin.delete(kind, job.item, propagationPolicy="Background")
    wait_until(lambda: kubernetes.list_pods("train-1") == [])
    recreated = kubernetes.create_workload("train-1", ["sleep", "60"], kind)
    wait_until(lambda: kubernetes.is_running("train-1"))
    job.cancel()
    job.kill()
    assert job.wait_until_gone().state == "Deleted"
    with pytest.raises(RequestRefused, match="no longer exists"):
        job.resume()
    assert at(kubernetes.read_object(kind, recreated), *kind.suspend_field) is not True
    assert kubernetes.node.count_running() == 1


def test_cluster_without_kueue_is_asked_once(kubernetes: KubernetesCluster, cluster: FakeCluster) -> None:
    """Where there is no Kueue, a Job is suspended itself."""
    item = kubernetes.start_workload()
    asked: list[str] = []

    def deny_kueue(request: Request) -> None:
        if request.user == RECEIVER and request.path.startswith("/apis/kueue.x-k8s.io"):
            asked.append(request.path)
            raise StatusError(404, "NotFound", "the server could not find the requested resource")

    cluster.faults.append(deny_kueue)
    job = kubernetes.find_job(item)
    job.cancel()
    assert job.wait_until_gone().state == "Suspended"
    assert kubernetes.read_object(JOB, item)["spec"]["suspend"] is True
    assert len(asked) == 1


def test_kind_without_the_suspend_field_is_refused(kubernetes: KubernetesCluster, cluster: FakeCluster) -> None:
    """A kind whose definition drops spec.suspend is refused."""
    item = kubernetes.start_workload(JOBSET)
    (resource,) = [resource for resource in cluster.resources if resource.kind == "JobSet"]
    resource.fields = frozenset({"template"})
    job = kubernetes.find_job(item)
    with pytest.raises(RequestRefused, match="cannot suspend it"):
        job.cancel()


def test_ray_job_is_suspended_together_with_its_cluster(kubernetes: KubernetesCluster) -> None:
    """A RayJob that would leave its cluster running is told to shut it down in the patch that suspends it."""
    item = kubernetes.start_workload(RAY_JOB, shutdownAfterJobFinishes=False)
    job = kubernetes.find_job(item)
    job.cancel()
    assert job.wait_until_gone().state == "Suspended"
    assert kubernetes.node.count_running() == 0
    job.resume()
    wait_until(lambda: kubernetes.is_running("train-1"))


@pytest.mark.parametrize("is_same_owner", [True, False])
def test_job_that_its_owner_creates_again_is_not_gone(kubernetes: KubernetesCluster, is_same_owner: bool) -> None:
    """A controller that this receiver does not know starts the job again under another name: the stop is not over."""

    def create(name: str, owner: Json) -> Json:
        item = kubernetes.create_workload(name, ["sleep", "60"], suspend=True)
        reference = {"apiVersion": owner["apiVersion"], "kind": owner["kind"], "controller": True}
        reference |= {name: owner["metadata"][name] for name in ("name", "uid")}
        kubernetes.admin.patch(JOB, item, {"metadata": {"ownerReferences": [reference]}})
        kubernetes.admin.patch(JOB, item, {"spec": {"suspend": False}})
        wait_until(lambda: kubernetes.is_running(name))
        return item

    kind = Kind("Event", "", "events")  # to the receiver no workload; it stands for one that it does not know
    owners = [kubernetes.admin.create(kind, NAMESPACE, {"metadata": {"name": name}}) for name in ("flow", "other")]
    job = kubernetes.find_job(create("train-1", owners[0]))
    job.cancel()
    wait_until(lambda: kubernetes.list_pods("train-1") == [])
    create("train-2", owners[0 if is_same_owner else 1])
    if is_same_owner:
        wait_until(lambda: job.check() == Present("started again by Event flow, as Job train-2"))
    else:
        job.wait_until_gone()


@pytest.mark.nightly
@pytest.mark.slow
def test_pods_of_a_lost_node_are_deleted_after_their_grace(kubernetes: KubernetesCluster) -> None:
    """Pods of a lost node are force-deleted only after their grace period, and do not prove that they have ended."""
    job = kubernetes.find_job(kubernetes.start_workload(kubernetes.kind))
    kubernetes.node.lost = True
    job.cancel()
    (pod,) = wait_until(
        lambda: [pod for pod in kubernetes.list_pods("train-1") if pod["metadata"].get("deletionTimestamp")]
    )
    job.kill()
    assert [pod["metadata"]["uid"] for pod in kubernetes.list_pods("train-1")] == [pod["metadata"]["uid"]]
    assert isinstance(job.check(), Present)

    def is_deleted_by_kill() -> bool:
        job.kill()
        return kubernetes.list_pods("train-1") == []

    wait_until(is_deleted_by_kill)
    end = wait_until(lambda: None if isinstance(state := job.check(), Present) else state)
    assert isinstance(end, Unproven)
    assert "the GPUs are not proven free" in end.reason


@pytest.mark.nightly
def test_kill_deletes_pods_that_their_controller_left(kubernetes: KubernetesCluster) -> None:
    """If its controller is down a workload's pods are deleted, with their own grace period."""
    job = kubernetes.find_job(kubernetes.start_workload(PYTORCH_JOB))
    # its controller ignores it now
    kubernetes.admin.set_status(PYTORCH_JOB, job.item, {"conditions": [{"type": "Succeeded", "status": "True"}]})
    job.kill()
    job.wait_until_gone()
    wait_until(lambda: kubernetes.list_pods("train-1") == [])


def test_resume_of_a_deleted_job_is_refused(kubernetes: KubernetesCluster) -> None:
    """A deleted workload cannot be resumed, and the refusal says so."""
    job = kubernetes.find_job(kubernetes.start_workload())
    kubernetes.admin.delete(JOB, job.item)
    job.wait_until_gone()
    with pytest.raises(RequestRefused, match="cannot be resumed"):
        job.resume()


def test_parked_workload_is_suspended_and_can_be_resumed(kubernetes: KubernetesCluster) -> None:
    """Parking suspends a workload, which can be resumed."""
    job = kubernetes.find_job(kubernetes.start_workload(PYTORCH_JOB))
    job.job_control.park_job(job.found, make_stop_request(job.labels))
    assert wait_until_parked(job.job_control, job.found).details["parked_as"] == "suspended"
    job.resume()
    wait_until(lambda: isinstance(job.job_control.check_parked(job.found), Present))


@pytest.mark.nightly
def test_externally_resumed_workload_is_present_again(kubernetes: KubernetesCluster) -> None:
    """A suspended workload is gone, for a restarted receiver too, until someone else resumes it."""
    job = kubernetes.find_job(kubernetes.start_workload(PYTORCH_JOB))
    job.cancel()
    job.wait_until_gone()
    restarted = replace(job, job_control=kubernetes.job_control())
    assert isinstance(restarted.check(), Gone)
    kubernetes.admin.patch(PYTORCH_JOB, job.item, set_field(PYTORCH_JOB.suspend_field, False))
    assert isinstance(job.check(), Present)


@pytest.fixture
def launcher(request: pytest.FixtureRequest, kubernetes: KubernetesCluster) -> KubernetesLauncher:
    return KubernetesLauncher(kubernetes, **request.cls.options)


@pytest.mark.slow
class TestSuspendedJob(Conformance):
    """spec.suspend of a batch/v1 Job."""

    options: ClassVar[dict[str, Any]] = {"kind": JOB}


@pytest.mark.slow
@pytest.mark.nightly
class TestQueuedJob(Conformance):
    """spec.active of Kueue's Workload."""

    options: ClassVar[dict[str, Any]] = {"kind": JOB, "is_queued": True}
