"""The tests of the job_control, on a real API server: those that need no server of another age, and no faults in it."""

from __future__ import annotations

import pytest
from evalstop_client.errors import RequestRefused, SchedulerUnavailable
from evalstop_client.receivers import Present
from evalstop_client.receivers.kubernetes.job_control import KubernetesJobControl
from evalstop_client.receivers.kubernetes.kinds import JOB

from tests.clients.receivers.conformance import find_job, make_stop_request, wait_until_gone
from tests.clients.receivers.kubernetes.cluster import KubernetesCluster
from tests.clients.receivers.kubernetes.test_job_control import (
    test_another_of_the_same_name_is_left_alone,
    test_every_kind_is_found_from_below_ended_and_let_go_on,
    test_force_deletes_what_nobody_has_deleted,
    test_job_that_ended_by_itself_is_gone_in_its_own_words,
    test_labels_that_lead_elsewhere_are_refused,
    test_pod_that_belongs_to_nothing_is_refused,
    test_pods_are_annotated_where_somebody_wants_it,
    test_pods_of_a_lost_node_are_deleted_for_good_once_their_grace_is_over,
    test_report_tells_what_kubernetes_tells,
    test_runs_of_other_clusters_are_not_ours,
    test_undo_of_a_deletion_is_refused,
    test_workload_that_is_resumed_by_somebody_else_is_there_again,
)

pytestmark = pytest.mark.real

__all__ = [
    "test_another_of_the_same_name_is_left_alone",
    "test_every_kind_is_found_from_below_ended_and_let_go_on",
    "test_force_deletes_what_nobody_has_deleted",
    "test_job_that_ended_by_itself_is_gone_in_its_own_words",
    "test_labels_that_lead_elsewhere_are_refused",
    "test_pod_that_belongs_to_nothing_is_refused",
    "test_pods_are_annotated_where_somebody_wants_it",
    "test_pods_of_a_lost_node_are_deleted_for_good_once_their_grace_is_over",
    "test_report_tells_what_kubernetes_tells",
    "test_runs_of_other_clusters_are_not_ours",
    "test_undo_of_a_deletion_is_refused",
    "test_workload_that_is_resumed_by_somebody_else_is_there_again",
]


def test_job_that_the_real_server_cannot_suspend(kubernetes: KubernetesCluster) -> None:
    """Kubernetes 1.20 answers 200 and drops the field: refused, left without pods, or deleted, as configured."""
    item = kubernetes.start(parallelism=2)
    labels = kubernetes.labels(item)
    job_control = kubernetes.job_control(instead="refuse")
    job = find_job(job_control, labels)
    with pytest.raises(RequestRefused, match="dropped it"):
        job_control.cancel_job(job, make_stop_request(labels))
    assert isinstance(job_control.check_job(job), Present)
    job_control = kubernetes.job_control()
    job_control.cancel_job(job, make_stop_request(labels))
    assert wait_until_gone(job_control, job).state == "Suspended"
    job_control.resume_job(job)
    assert kubernetes.now(JOB, item)["spec"]["parallelism"] == 2
    kubernetes.grant("batch", "jobs", "delete")
    job_control = kubernetes.job_control(instead="delete")
    job_control.cancel_job(job, make_stop_request(labels))
    assert wait_until_gone(job_control, job).state == "Deleted"


def test_strangers_are_turned_away_by_the_real_server(kubernetes: KubernetesCluster) -> None:
    """A token that is not known is waited for, and what the Role does not grant is refused, by name."""
    labels = kubernetes.labels(kubernetes.start())
    job_control = kubernetes.job_control(stop_by="delete")
    job = find_job(job_control, labels)
    with pytest.raises(RequestRefused, match=r"verb 'delete' on jobs\.batch in namespace research"):
        job_control.cancel_job(job, make_stop_request(labels))
    stranger = KubernetesJobControl(kubernetes.api("no-such-token"), namespaces=None)
    with pytest.raises(SchedulerUnavailable, match="401"):
        stranger.find_job(make_stop_request(labels))
