"""One real Slurm for all tests here. Without Slurm they are skipped, and fail in CI."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from tests.clients.receivers.slurm.launcher import SlurmLauncher
from tests.fixtures.slurm import SlurmCluster, SlurmUnavailable, start_slurm


@pytest.fixture(scope="package")
def cluster() -> Iterator[SlurmCluster]:
    """One node with two GPUs, and three seconds from SIGTERM to SIGKILL."""
    try:
        starting = start_slurm(gpus=2, kill_wait_seconds=3)
        with starting as cluster:
            yield cluster
    except SlurmUnavailable as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))


@pytest.fixture
def launcher(cluster: SlurmCluster) -> Iterator[SlurmLauncher]:
    """Starts jobs that are cancelled after the test, in a folder that the node's daemon can write to."""
    folder = cluster.folder / "tests" / f"test-{time.monotonic_ns()}"
    folder.mkdir()
    launcher = SlurmLauncher(cluster, folder)
    yield launcher
    cluster.cancel_all_jobs()
