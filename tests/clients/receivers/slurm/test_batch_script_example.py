"""The example batch script in a real Slurm."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.acceptance.examples.programs import EXAMPLES, find_run
from tests.clients.programs import wait_until
from tests.clients.receivers.slurm.deployment import STOP_SECONDS
from tests.fixtures.forked_service import running_service
from tests.fixtures.slurm import SlurmCluster

pytestmark = [pytest.mark.real, pytest.mark.nightly]


def test_batch_script_run_has_the_jobs_labels(cluster: SlurmCluster, tmp_path: Path) -> None:
    """Its run is named after the job, has the job's labels, and is stopped by the service."""
    with running_service(tmp_path / "service") as service:
        job = cluster.submit_job(
            (EXAMPLES / "slurm.sh").read_text().partition("\n")[2],
            "--gres=gpu:1",
            "--job-name=watched",
            f"--chdir={tmp_path}",
            f"--output={tmp_path}/output",
            EVALSTOP_URL=service.url,
            EVALSTOP_KEY=service.key,
            EVALSTOP_SPOOL=str(tmp_path / "spool"),
            TRAINER=str(EXAMPLES / "plain_loop.py"),
            PATH=f"{Path(sys.executable).parent}:/usr/bin:/bin",
        )
        wait_until(lambda: cluster.get_job_state(job) == "COMPLETED", STOP_SECONDS)
        run = find_run(service, f"watched-{job}")
        assert run["labels"]["slurm_job_id"] == job
        assert run["labels"]["job_kind"] == "sft"
        assert run["decision"] is not None, (tmp_path / "output").read_text()
