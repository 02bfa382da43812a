"""One real Kubernetes API for all tests here, which include tests of the folder above."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.receivers.kubernetes.cluster import ApiServer, KubernetesCluster, running_cluster
from tests.clients.receivers.kubernetes.real.control_plane import running_control_plane


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """A real API server; `make test-kubernetes` builds it and runs these tests."""
    if os.environ.get("TEST_KUBERNETES") != "real":
        pytest.skip("make test-kubernetes runs these on a real API server")
    with running_control_plane(tmp_path_factory.mktemp("kubernetes")) as server:
        yield server


@pytest.fixture
def kubernetes(server: ApiServer, tmp_path: Path) -> Iterator[KubernetesCluster]:
    """A running cluster, empty after each test."""
    with running_cluster(server, tmp_path) as kubernetes:
        yield kubernetes
