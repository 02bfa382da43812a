"""One real Kubernetes API for all tests here: the tests of the folder above run on it as they stand."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.receivers.kubernetes.cluster import KubernetesCluster, Server, world
from tests.clients.receivers.kubernetes.real.control_plane import real_server


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A real server; these tests are run by `make test-kubernetes`, which builds one first."""
    if os.environ.get("TEST_KUBERNETES") != "real":
        pytest.skip("make test-kubernetes runs these on a real API server")
    with real_server(tmp_path_factory.mktemp("kubernetes")) as server:
        yield server


@pytest.fixture
def kubernetes(server: Server, tmp_path: Path) -> Iterator[KubernetesCluster]:
    """A cluster in which things run, and nothing is left from the test before."""
    with world(server, tmp_path) as made:
        yield made
