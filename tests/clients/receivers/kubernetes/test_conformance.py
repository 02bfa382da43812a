"""The battery for receivers, on a fake API server: each way to stop a workload."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from evalstop_client.receivers.kubernetes.kinds import JOB, JOBSET

from tests.clients.receivers.conformance import Conformance
from tests.clients.receivers.kubernetes.cluster import KubernetesCluster, KubernetesLauncher
from tests.clients.receivers.kubernetes.fake_cluster import FakeCluster


@pytest.fixture
def cluster(request: pytest.FixtureRequest, cluster: FakeCluster) -> FakeCluster:
    """A server as old as the class of tests wants it."""
    return FakeCluster(tokens=cluster.tokens, knows_suspend=getattr(request.cls, "knows_suspend", True))


@pytest.fixture
def launcher(request: pytest.FixtureRequest, kubernetes: KubernetesCluster) -> KubernetesLauncher:
    return KubernetesLauncher(kubernetes, **request.cls.setting)


class TestSuspendedJob(Conformance):
    """spec.suspend of a batch/v1 Job."""

    setting: ClassVar[dict[str, Any]] = {"kind": JOB}


class TestJobOfAnOldCluster(Conformance):
    """parallelism 0, where the API server drops spec.suspend."""

    setting: ClassVar[dict[str, Any]] = {"kind": JOB}
    knows_suspend = False


class TestJobInAQueue(Conformance):
    """spec.active of Kueue's Workload."""

    setting: ClassVar[dict[str, Any]] = {"kind": JOB, "is_queued": True}


class TestDeletedJobSet(Conformance):
    """A JobSet is deleted, found by a pod two controllers below it."""

    setting: ClassVar[dict[str, Any]] = {"kind": JOBSET, "options": {"stop_by": "delete"}}
