"""The labels of its scheduler's job that a run sends, and the identity by which a job's processes find each other."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from evalstop_client import Run
from evalstop_client.job_identity import (
    KUBERNETES_LABELS,
    LONGEST_IDENTITY,
    SLURM_LABELS,
    identify_job,
    scheduler_labels,
)

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


POD = {"EVALSTOP_KUBERNETES_NAMESPACE": "ml", "EVALSTOP_KUBERNETES_KIND": "Job", "EVALSTOP_KUBERNETES_NAME": "ppo"}


@pytest.mark.parametrize(
    ("environment", "identity"),
    [
        ({"SLURM_JOB_ID": "7", "SLURM_CLUSTER_NAME": "alpha", "SLURM_PROCID": "3"}, "slurm:alpha:7"),
        ({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1", "TORCHELASTIC_RUN_ID": "x"}, "slurm::7"),
        ({"TORCHELASTIC_RUN_ID": "launch-1", "RANK": "2"}, "torchrun:launch-1"),
        (POD | {"EVALSTOP_KUBERNETES_UID": "u-1"}, "kubernetes::ml:Job:ppo:u-1"),
        (POD | {"SLURM_JOB_ID": "7"}, "kubernetes::ml:Job:ppo:"),
    ],
)
def test_identity_is_the_outermost_job(environment: dict[str, str], identity: str) -> None:
    """Every rank has the identity of the outermost scheduler or launcher."""
    assert identify_job(environment) == identity


def test_torchrun_without_rdzv_id_uses_the_parent_process() -> None:
    """Without --rdzv-id torchrun gives every launch the same id, so the launcher's process id is used."""
    identity = identify_job({"TORCHELASTIC_RUN_ID": "none"})
    assert identity.endswith(f":{os.getppid()}")
    assert len(identify_job({"TORCHELASTIC_RUN_ID": "x" * 1000})) == LONGEST_IDENTITY


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks where there is fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_process_without_a_scheduler_is_a_job() -> None:
    """A process and its forks are one job; a process that it starts is another."""
    own = identify_job({})
    assert identify_job({}) == own
    child = os.fork()
    if child == 0:
        os._exit(0 if identify_job({}) == own else 1)
    assert os.waitpid(child, 0)[1] == 0
    code = "from evalstop_client.job_identity import identify_job; print(identify_job({}))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert other.startswith("process:")
    assert other != own
