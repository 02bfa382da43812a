"""One real Slurm for all tests here; skipped where it is not installed, and failing in CI."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.fixtures.slurm import NoSlurm, SlurmCluster, slurm


@pytest.fixture(scope="package")
def cluster() -> Iterator[SlurmCluster]:
    """One node, two GPUs, three seconds from SIGTERM to SIGKILL."""
    try:
        bringing_up = slurm(gpus=2, kill_wait_seconds=3)
        with bringing_up as cluster:
            yield cluster
    except NoSlurm as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))
