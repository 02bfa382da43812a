"""Tests of KubernetesJobControl that run on the real API server too, and what only a real one shows."""

from __future__ import annotations

import pytest
from evalstop_client.errors import RequestRefused, SchedulerUnavailable
from evalstop_client.receivers.kubernetes.control import KubernetesJobControl
from evalstop_client.receivers.kubernetes.kinds import JOB

from tests.clients.receivers.conformance import make_stop_request
from tests.clients.receivers.kubernetes.cluster import KubernetesCluster
from tests.clients.receivers.kubernetes.test_job_control import (  # noqa: F401  # and these
    test_completed_job_is_gone_and_not_suspended,
    test_every_kind_is_found_stopped_and_resumed,
    test_externally_resumed_workload_is_present_again,
    test_kill_deletes_pods_that_their_controller_left,
    test_pods_are_annotated_by_label_or_option,
    test_pods_of_a_lost_node_are_deleted_after_their_grace,
    test_recreated_workload_is_left_alone,
    test_report_has_the_pods_ends,
    test_resume_of_a_deleted_job_is_refused,
)
from tests.clients.receivers.kubernetes.test_job_finding import (  # noqa: F401  # they run here too
    test_labels_of_another_object_are_refused,
    test_pod_of_no_workload_is_refused,
    test_runs_of_other_clusters_are_foreign,
)

pytestmark = pytest.mark.real


def test_real_server_without_spec_suspend(kubernetes: KubernetesCluster) -> None:
    """Kubernetes 1.20 accepts and drops spec.suspend: the Job is scaled to 0, and back."""
    item = kubernetes.start_workload(parallelism=2)
    job = kubernetes.find_job(item)
    job.cancel()
    assert job.wait_until_gone().state == "Suspended"
    job.resume()
    assert kubernetes.read_object(JOB, item)["spec"]["parallelism"] == 2


def test_real_server_rejects_unknown_tokens_and_missing_verbs(kubernetes: KubernetesCluster) -> None:
    """An unknown token is retried, and a verb that the Role does not grant is refused by name."""
    job = kubernetes.find_job(kubernetes.start_workload(), stop_by="delete")
    with pytest.raises(RequestRefused, match=r"verb 'delete' on jobs\.batch in namespace research"):
        job.cancel()
    unknown = KubernetesJobControl(kubernetes.connect("no-such-token"), namespaces=None)
    with pytest.raises(SchedulerUnavailable, match="401"):
        unknown.find_job(make_stop_request(job.labels))
