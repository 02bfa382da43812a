"""A cluster on a fake API server for every test here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.receivers.kubernetes.cluster import RECEIVER, ApiServer, KubernetesCluster, running_cluster
from tests.clients.receivers.kubernetes.fake_api_server import FakeApiServer
from tests.clients.receivers.kubernetes.fake_cluster import ADMIN, FakeCluster

TOKEN = "receiver-token"


@pytest.fixture
def cluster() -> FakeCluster:
    """The state of the fake API server."""
    return FakeCluster(tokens={ADMIN: "admin", TOKEN: RECEIVER})


@pytest.fixture
def api_server(cluster: FakeCluster) -> Iterator[FakeApiServer]:
    with FakeApiServer(cluster) as server:
        yield server


@pytest.fixture
def kubernetes(api_server: FakeApiServer, cluster: FakeCluster, tmp_path: Path) -> Iterator[KubernetesCluster]:
    """A running cluster."""
    with running_cluster(ApiServer(api_server.url, ADMIN, TOKEN), tmp_path) as kubernetes:
        yield kubernetes
