"""Tests of the folder above that run on the real API server too, and what only a real one shows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any, ClassVar

import pytest
from evalstop_client.errors import RequestRefused, SchedulerUnavailable
from evalstop_client.receivers.kubernetes.control import KubernetesJobControl
from evalstop_client.receivers.kubernetes.kinds import JOB, JOBSET, KINDS, Kind

from tests.acceptance.packaging.test_deploy import MANIFESTS, VALUES, render_chart
from tests.clients.receivers.conformance import Conformance, make_stop_request
from tests.clients.receivers.kubernetes.admin import Admin
from tests.clients.receivers.kubernetes.cluster import (
    NAMESPACE,
    ApiServer,
    KubernetesCluster,
    KubernetesLauncher,
    load_manifest,
)
from tests.clients.receivers.kubernetes.test_idle_returns import (  # noqa: F401
    test_parked_workload_runs_while_nobody_waits,
    test_pods_elsewhere_count_where_they_may_be_listed,
    test_pods_of_parked_workloads_do_not_wait,
    test_workloads_in_a_queue_of_kueue_wait,
)
from tests.clients.receivers.kubernetes.test_job_control import (  # noqa: F401  # and these
    stop_and_resume,
    test_externally_resumed_workload_is_present_again,
    test_kill_deletes_pods_that_their_controller_left,
    test_pods_of_a_lost_node_are_deleted_after_their_grace,
    test_recreated_workload_is_left_alone,
    test_report_has_the_pods_end,
    test_resume_of_a_deleted_job_is_refused,
    test_stopped_workload_says_why,
)
from tests.clients.receivers.kubernetes.test_job_finding import (  # noqa: F401  # they run here too
    test_labels_of_another_object_are_refused,
    test_runs_of_other_clusters_are_foreign,
)
from tests.clients.receivers.kubernetes.test_receiver import test_stop_frees_a_gpu_for_a_waiting_job  # noqa: F401

pytestmark = pytest.mark.real


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not JOB], ids=str)
def test_every_kind_is_found_stopped_and_resumed(kubernetes: KubernetesCluster, kind: Kind) -> None:
    """Every kind but batch/v1 Jobs, which Kubernetes 1.20 cannot suspend, is stopped and resumed."""
    stop_and_resume(kubernetes, kind)


def test_job_that_the_server_cannot_suspend_is_refused(kubernetes: KubernetesCluster) -> None:
    """Kubernetes 1.20 accepts and drops spec.suspend of a Job: the stop is refused."""
    job = kubernetes.find_job(kubernetes.start_workload())
    with pytest.raises(RequestRefused, match="cannot suspend it"):
        job.cancel()


def test_real_server_rejects_unknown_tokens_and_missing_verbs(kubernetes: KubernetesCluster) -> None:
    """An unknown token is retried, and a verb that the Role does not grant is refused by name."""
    item = kubernetes.start_workload()
    with pytest.raises(RequestRefused, match=r"verb 'delete' on jobs\.batch in namespace research"):
        kubernetes.connect().delete(JOB, NAMESPACE, item["metadata"]["name"], {})
    unknown = KubernetesJobControl(kubernetes.connect("no-such-token"), namespaces=None)
    with pytest.raises(SchedulerUnavailable, match="401"):
        unknown.find_job(make_stop_request(kubernetes.get_run_labels(item)))


@pytest.fixture
def launcher(request: pytest.FixtureRequest, kubernetes: KubernetesCluster) -> KubernetesLauncher:
    return KubernetesLauncher(kubernetes, **request.cls.options)


class TestJobSet(Conformance):
    """spec.suspend of a JobSet: Kubernetes 1.20 cannot suspend a Job."""

    options: ClassVar[dict[str, Any]] = {"kind": JOBSET}


class TestQueuedJobSet(Conformance):
    """spec.active of Kueue's Workload."""

    options: ClassVar[dict[str, Any]] = {"kind": JOBSET, "is_queued": True}


@pytest.fixture
def admin(server: ApiServer) -> Iterator[Admin]:
    with closing(Admin(server.url, server.admin_token, server.tls)) as admin:
        for name in ("tools", "research", "eval", "evalstop"):
            admin.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
        yield admin


@pytest.mark.parametrize("file", [file.name for file in MANIFESTS])
def test_manifests_are_accepted(admin: Admin, file: str) -> None:
    """Each manifest is validated by a dry run."""
    assert list_refusals(admin, load_manifest(f"kubernetes/{file}")) == []


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES.keys())
def test_chart_is_accepted(admin: Admin, values: dict[str, Any]) -> None:
    """The chart's objects are validated by a dry run, for each set of values."""
    assert list_refusals(admin, render_chart(values)) == []


def list_refusals(admin: Admin, items: list[dict[str, Any]]) -> list[str]:
    """What the server refuses, with its message."""
    refused = []
    for item in items:
        group, _, version = item["apiVersion"].rpartition("/")
        root = f"/apis/{group}/{version}" if group else f"/api/{version}"
        plural = {"Ingress": "ingresses", "NetworkPolicy": "networkpolicies"}.get(
            item["kind"], f"{item['kind'].lower()}s"
        )
        namespace = item["metadata"].get("namespace", "tools")
        response = admin.http.post(f"{root}/namespaces/{namespace}/{plural}", params={"dryRun": "All"}, json=item)
        if response.status_code not in (201, 409):
            refused.append(f"{item['kind']} {item['metadata']['name']}: {response.text}")
    return refused
