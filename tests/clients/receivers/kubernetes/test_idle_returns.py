"""Parked workloads run while nobody waits: who waits in a cluster, and what happens to the workload then."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from evalstop_client.receivers.kubernetes.kinds import JOB, JOBSET, POD, RAY_JOB, WORKLOAD, Kind
from evalstop_client.receivers.stop.execution import ReceiverContext
from evalstop_client.receivers.stop.job_control import Job, Parked, Present
from evalstop_client.receivers.stop.journal import Journal
from evalstop_client.receivers.stop.receiver import IdleReturns
from evalstop_client.receivers.stop.state_machine import Phase, Report, Stop, StopTimeouts
from evalstop_client.receivers.stop.webhooks import Receiver

from tests.acceptance.docs.connect_pages import read_block
from tests.clients.programs import wait_until
from tests.clients.receivers.conformance import DroppedReports, make_stop_request, wait_until_parked
from tests.clients.receivers.kubernetes.admin import Json
from tests.clients.receivers.kubernetes.cluster import NAMESPACE, FoundJob, KubernetesCluster

SLEEP = ["sleep", "600"]


def park(job: FoundJob) -> None:
    job.job_control.park_job(job.found, make_stop_request(job.labels))
    wait_until_parked(job.job_control, job.found)


def find_whether_others_wait(job: FoundJob) -> bool:
    return job.job_control.others_wait(job.found, [job.found])


@pytest.mark.parametrize("kind", [RAY_JOB, pytest.param(JOBSET, marks=pytest.mark.nightly)], ids=str)
def test_parked_workload_runs_while_nobody_waits(kubernetes: KubernetesCluster, kind: Kind) -> None:
    """It stays suspended while a pod waits, runs when none does, and is set aside again, as often as it may."""
    kubernetes.node.gpus = 2 if kind is RAY_JOB else 1
    job = kubernetes.find_job(kubernetes.start_workload(kind))
    name, request, journal = job.item["metadata"]["name"], make_stop_request(job.labels), Journal(None)
    journal.record_stop(request, Stop(0.0, Phase.DONE, job=job.found, parks=True, report=Report("parked", "")))
    context = ReceiverContext(job.job_control, journal, DroppedReports(), StopTimeouts())
    returns = IdleReturns(Receiver(context, list), most=1)

    def look_until(condition: Callable[[], bool]) -> None:
        def look() -> bool:
            returns.look()
            return condition()

        wait_until(look)

    def check() -> object:
        return job.job_control.check_parked(job.found)

    def submit(name: str) -> Json:
        return kubernetes.create_workload(name, SLEEP, parallelism=kubernetes.node.gpus)

    def delete(*items: Json) -> None:
        for item in items:
            kubernetes.admin.delete(JOB, item, propagationPolicy="Background")
        wait_until(lambda: all(kubernetes.list_pods(item["metadata"]["name"]) == [] for item in items))

    park(job)
    others = submit("first"), submit("second")
    wait_until(lambda: find_whether_others_wait(job))
    returns.look()
    assert isinstance(check(), Parked)
    delete(*others)
    look_until(lambda: kubernetes.is_running(name))
    assert isinstance(check(), Present)
    third = submit("third")
    look_until(lambda: kubernetes.is_running("third"))
    look_until(lambda: isinstance(check(), Parked))
    assert [entry.stop.idle_returns for entry in journal.list_parked()] == [1]
    delete(third)
    returns.look()
    assert isinstance(check(), Parked), "it has run as often as it may"


def test_pods_of_parked_workloads_do_not_wait(kubernetes: KubernetesCluster) -> None:
    """A workload that was let run and does not fit is in nobody's way, and has not run."""
    kubernetes.node.gpus = 2
    job = kubernetes.find_job(kubernetes.start_workload(JOBSET))
    park(job)
    kubernetes.node.gpus = 0
    job.resume()
    wait_until(lambda: any(pod["status"].get("conditions") for pod in kubernetes.admin.list(POD, NAMESPACE)))
    assert not find_whether_others_wait(job)
    assert job.job_control.others_wait(job.found, [Job("other", {"uid": "1"})])
    assert wait_until(job.check) == Present("Pending, 1 of its pods", runs=False)


def test_workloads_in_a_queue_of_kueue_wait(kubernetes: KubernetesCluster) -> None:
    """A Workload waits until it has its quota, unless its queue gives none or it is the parked one."""
    job = kubernetes.find_job(kubernetes.start_workload(JOBSET))
    own = kubernetes.add_to_kueue(JOBSET, job.item)
    park(job)
    other = kubernetes.add_to_kueue(JOB, kubernetes.create_workload("other", SLEEP))
    assert find_whether_others_wait(job)
    for status, reason, waits in (("True", "QuotaReserved", False), ("False", "Pending", True)):
        set_quota(kubernetes, other, status, reason)
        assert find_whether_others_wait(job) is waits
    set_quota(kubernetes, other, "False", "Inadmissible")
    assert not find_whether_others_wait(job)
    job.resume()
    assert kubernetes.read_object(WORKLOAD, own)["spec"]["active"] is True
    assert not find_whether_others_wait(job)
    assert job.job_control.others_wait(job.found, [])


def set_quota(kubernetes: KubernetesCluster, workload: Json, status: str, reason: str) -> None:
    condition = {"type": "QuotaReserved", "status": status, "reason": reason}
    kubernetes.admin.set_status(WORKLOAD, workload, {"conditions": [condition]})


def test_pods_elsewhere_count_where_they_may_be_listed(kubernetes: KubernetesCluster) -> None:
    """Without a ClusterRole only the namespaces in which workloads may be stopped are looked at."""
    job = kubernetes.find_job(kubernetes.start_workload(kubernetes.kind))
    park(job)
    kubernetes.node.gpus = 0
    container = {"name": "a", "image": "none", "command": SLEEP, "resources": {"limits": {"nvidia.com/gpu": "1"}}}
    spec = {"containers": [container], "terminationGracePeriodSeconds": 0}
    elsewhere = kubernetes.admin.create(POD, "default", {"metadata": {"name": "elsewhere"}, "spec": spec})
    wait_until(lambda: kubernetes.admin.get(POD, "default", "elsewhere")["status"].get("conditions"))  # type: ignore[index]
    assert not find_whether_others_wait(job)
    (documented, _) = read_block("clusterrole of waiting").splitlines()
    granted = dict(re.findall(r"--(verb|resource)=(\S+)", documented))
    for resource in granted["resource"].split(","):
        plural, _, group = resource.partition(".")
        kubernetes.grant_verbs(group, plural, granted["verb"], everywhere=True)
    wait_until(lambda: find_whether_others_wait(job))
    kubernetes.admin.delete(POD, elsewhere, gracePeriodSeconds=0)
