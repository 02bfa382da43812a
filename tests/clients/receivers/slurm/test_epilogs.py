"""Stops on a Slurm whose epilog requeues every job that ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.receivers.slurm.deployment import deploy
from tests.fixtures.forked_service import running_service
from tests.fixtures.slurm import SlurmCluster, SlurmUnavailable, start_slurm

pytestmark = [pytest.mark.real, pytest.mark.nightly, pytest.mark.timeout(600)]


@pytest.fixture(params=["Epilog", "EpilogSlurmctld"])
def cluster(request: pytest.FixtureRequest) -> Iterator[SlurmCluster]:
    """A cluster with an epilog on the node, or of the controller."""
    try:
        with start_slurm(requeues_in=request.param) as cluster:
            yield cluster
    except SlurmUnavailable as error:
        pytest.skip(str(error))


def test_job_that_the_epilog_requeues_is_ended(cluster: SlurmCluster, tmp_path: Path) -> None:
    """The cancel has the epilog requeue the job, so it is cancelled again, and confirmed once it no longer waits."""
    with running_service(tmp_path) as service, deploy(cluster, service, tmp_path) as deployment:
        deployment.start_listening_receiver("epilog")
        job = deployment.submit_trainer("requeued")
        details = deployment.wait_for_confirmation(job)
        assert (details["how"], details["scheduler_state"]) == ("cancelled", "CANCELLED")
        assert cluster.get_job_field(job.id, "Restarts") == "1"
