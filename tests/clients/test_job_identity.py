"""What the processes of one job say of themselves."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from evalstop_client.job_identity import LONGEST_IDENTITY, identify_job

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
def test_the_identity_is_the_job(environment: dict[str, str], identity: str) -> None:
    """What the scheduler or launcher calls the job, the outermost of them, is its identity on every rank."""
    assert identify_job(environment) == identity


def test_ranks_without_a_run_id_are_told_by_their_launcher() -> None:
    """torchrun without --rdzv-id gives every launch the same id: the process that launched the ranks is another."""
    identity = identify_job({"TORCHELASTIC_RUN_ID": "none"})
    assert identity.endswith(f":{os.getppid()}")
    assert len(identify_job({"TORCHELASTIC_RUN_ID": "x" * 1000})) == LONGEST_IDENTITY


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks where there is fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_outside_of_a_scheduler_a_process_is_a_job() -> None:
    """A process stays the same job, and so do those that it forks; one that is started is another."""
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
