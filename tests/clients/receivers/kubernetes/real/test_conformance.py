"""The conformance suite on a real API server."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from evalstop_client.receivers.kubernetes.kinds import JOB, JOBSET

from tests.clients.receivers.conformance import Conformance
from tests.clients.receivers.kubernetes.cluster import KubernetesCluster, KubernetesLauncher

pytestmark = pytest.mark.real


@pytest.fixture
def launcher(request: pytest.FixtureRequest, kubernetes: KubernetesCluster) -> KubernetesLauncher:
    return KubernetesLauncher(kubernetes, **request.cls.options)


class TestJob(Conformance):
    """parallelism 0, since Kubernetes 1.20 cannot suspend a Job."""

    options: ClassVar[dict[str, Any]] = {"kind": JOB}


class TestQueuedJobSet(Conformance):
    """spec.active of Kueue's Workload."""

    options: ClassVar[dict[str, Any]] = {"kind": JOBSET, "is_queued": True}


class TestDeletedJobSet(Conformance):
    """Foreground deletion by the real garbage collector."""

    options: ClassVar[dict[str, Any]] = {"kind": JOBSET, "options": {"stop_by": "delete"}}
