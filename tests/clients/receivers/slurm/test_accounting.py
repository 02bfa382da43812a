"""`sacct` on a real slurmdbd: the end of jobs that slurmctld no longer knows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from evalstop_client.receivers.stop.job_control import Gone, Unproven

from tests.clients.programs import wait_until
from tests.clients.receivers.conformance import find_job, make_stop_request, wait_until_gone
from tests.clients.receivers.slurm.launcher import SlurmLauncher
from tests.fixtures.slurm import SlurmCluster, SlurmUnavailable, start_slurm

pytestmark = [pytest.mark.real, pytest.mark.nightly, pytest.mark.timeout(600)]


@pytest.fixture
def cluster() -> Iterator[SlurmCluster]:
    """A cluster whose slurmctld forgets jobs two seconds after their end, and whose slurmdbd does not."""
    try:
        with start_slurm(accounts=True) as cluster:
            yield cluster
    except SlurmUnavailable as error:
        pytest.skip(str(error))


def test_end_of_a_forgotten_job_is_known_to_slurmdbd(launcher: SlurmLauncher, cluster: SlurmCluster) -> None:
    """A cancelled job is gone also once slurmctld has forgotten it; a job that never existed is not."""
    started = launcher.start()
    job = started.find()
    started.cancel(job)
    wait_until_gone(started.job_control, job)
    job_id = launcher.jobs[0]
    wait_until(lambda: not cluster.run_command("squeue", "--noheader", "--states=all", "--format=%A"), 120)
    assert launcher.connect().jobs(job_id) == []
    end = launcher.job_control().check_job(job)
    assert isinstance(end, Gone)
    assert end.state == "CANCELLED"
    assert find_job(launcher.job_control(), launcher.make_labels(job_id)).id == job_id
    unknown = type(job)("99999", {**job.facts, "job_id": "99999"})
    assert isinstance(launcher.job_control().check_job(unknown), Unproven)
    launcher.job_control().cancel_job(job, make_stop_request({}))
