"""One real Slurm for all tests here; skipped where it is not installed, and failing in CI."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from tests.clients.receivers.slurm.launcher import SlurmLauncher, connect_by_commands, opened
from tests.fixtures.slurm import SlurmCluster, SlurmUnavailable, start_slurm


@pytest.fixture(scope="package")
def cluster() -> Iterator[SlurmCluster]:
    """One node, two GPUs, three seconds from SIGTERM to SIGKILL."""
    try:
        bringing_up = start_slurm(gpus=2, kill_wait_seconds=3)
        with bringing_up as cluster:
            yield cluster
    except SlurmUnavailable as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))


@pytest.fixture
def launcher(request: pytest.FixtureRequest, cluster: SlurmCluster) -> Iterator[SlurmLauncher]:
    """Jobs that are cancelled at the end. Their folder is one that the node's daemon can see, whoever it is."""
    folder = cluster.folder / "rest" / f"test-{time.monotonic_ns()}"
    folder.mkdir()
    connect = getattr(request.cls, "connect", connect_by_commands)
    launcher = SlurmLauncher(cluster, folder, lambda: connect(cluster))
    yield launcher
    cluster.cancel_all_jobs()
    while opened:
        opened.pop().close()
