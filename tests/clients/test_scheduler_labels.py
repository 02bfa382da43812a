"""The labels of its scheduler's job that a run sends."""

from __future__ import annotations

import pytest
from evalstop_client import Run
from evalstop_client.job_identity import KUBERNETES_LABELS, SLURM_LABELS, scheduler_labels

from tests.clients.fake_service import KEY, FakeServer, FakeService
from tests.clients.programs import wait_until

IN_SLURM = {
    "SLURM_JOB_ID": "7", "SLURM_CLUSTER_NAME": "alpha", "SLURM_JOB_USER": "ann", "SLURM_JOB_PARTITION": "gpu"
}  # fmt: skip


def test_no_labels_without_a_scheduler() -> None:
    """Without a job id in the environment there are no labels."""
    assert scheduler_labels({"SLURM_CONF": "/etc/slurm.conf"}) == {}


def test_kubernetes_labels_need_a_name() -> None:
    """All Kubernetes labels are sent once the name is set, and none before."""
    assert scheduler_labels({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "EVALSTOP_KUBERNETES_KIND": "Job"}) == {}
    labels = scheduler_labels({"EVALSTOP_KUBERNETES_NAME": "train-7", "EVALSTOP_KUBERNETES_UID": "u-1"})
    assert labels.keys() == KUBERNETES_LABELS.keys()
    assert (labels["kubernetes_name"], labels["kubernetes_uid"], labels["kubernetes_kind"]) == ("train-7", "u-1", "")


def test_unset_slurm_labels_are_sent_empty() -> None:
    """The service merges labels, so an empty one replaces that of an earlier job."""
    labels = scheduler_labels(IN_SLURM)
    assert labels.keys() == SLURM_LABELS.keys()
    assert (labels["slurm_job_id"], labels["slurm_array_task_id"], labels["slurm_restart_count"]) == ("7", "", "0")
    assert scheduler_labels({**IN_SLURM, "SLURM_RESTART_COUNT": "2"})["slurm_restart_count"] == "2"


@pytest.mark.parametrize(
    ("variable", "label"), [(None, "batch"), ("0", "0"), ("12", "12"), ("4294967290", ""), ("4294967291", "")]
)
def test_only_steps_that_srun_started_are_named(variable: str | None, label: str) -> None:
    """The batch script is named as such; Slurm's own numbers, as of an interactive step, name nothing."""
    environment = IN_SLURM if variable is None else {**IN_SLURM, "SLURM_STEP_ID": variable}
    assert scheduler_labels(environment)["slurm_step_id"] == label


def test_run_sends_scheduler_labels_and_its_own(
    server: FakeServer, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run sends the scheduler's labels; the caller's labels win."""
    for name, value in IN_SLURM.items():
        monkeypatch.setenv(name, value)
    with Run(url=server.url, key=KEY, name="a run", labels={"seed": "3", "slurm_user": "somebody"}):
        wait_until(lambda: service.runs)
    labels = service.find_run("a run").opening["labels"]
    assert labels.items() >= {"slurm_job_id": "7", "slurm_cluster": "alpha", "seed": "3"}.items()
    assert labels["slurm_user"] == "somebody"
