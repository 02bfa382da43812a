"""The identity by which processes of one job recognize each other."""

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
