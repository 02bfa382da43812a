"""The conformance suite on a fake API server, for each way to stop a workload."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from evalstop_client.receivers.kubernetes.kinds import JOB, JOBSET

from tests.clients.receivers.conformance import Conformance
from tests.clients.receivers.kubernetes.cluster import KubernetesCluster, KubernetesLauncher
from tests.clients.receivers.kubernetes.fake_cluster import FakeCluster

pytestmark = pytest.mark.slow


@pytest.fixture
def cluster(request: pytest.FixtureRequest, cluster: FakeCluster) -> FakeCluster:
    """The fake API server's state, with the class's version."""
    return FakeCluster(tokens=cluster.tokens, knows_suspend=getattr(request.cls, "knows_suspend", True))


@pytest.fixture
def launcher(request: pytest.FixtureRequest, kubernetes: KubernetesCluster) -> KubernetesLauncher:
    return KubernetesLauncher(kubernetes, **request.cls.options)


class TestSuspendedJob(Conformance):
    """spec.suspend of a batch/v1 Job."""

    options: ClassVar[dict[str, Any]] = {"kind": JOB}


@pytest.mark.nightly
class TestJobBeforeKubernetes121(Conformance):
    """parallelism 0, where the API server drops spec.suspend."""

    options: ClassVar[dict[str, Any]] = {"kind": JOB}
    knows_suspend = False


@pytest.mark.nightly
class TestQueuedJob(Conformance):
    """spec.active of Kueue's Workload."""

    options: ClassVar[dict[str, Any]] = {"kind": JOB, "is_queued": True}


@pytest.mark.nightly
class TestDeletedJobSet(Conformance):
    """Deletion of a JobSet, found by a pod two controllers below it."""

    options: ClassVar[dict[str, Any]] = {"kind": JOBSET, "options": {"stop_by": "delete"}}
