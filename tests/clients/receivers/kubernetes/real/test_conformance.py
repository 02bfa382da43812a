"""The conformance suite on a real API server."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from evalstop_client.receivers.kubernetes.kinds import JOBSET

from tests.clients.receivers.conformance import Conformance
from tests.clients.receivers.kubernetes.cluster import KubernetesCluster, KubernetesLauncher

pytestmark = pytest.mark.real


@pytest.fixture
def launcher(request: pytest.FixtureRequest, kubernetes: KubernetesCluster) -> KubernetesLauncher:
    return KubernetesLauncher(kubernetes, **request.cls.options)


class TestJobSet(Conformance):
    """spec.suspend of a JobSet: Kubernetes 1.20 cannot suspend a Job."""

    options: ClassVar[dict[str, Any]] = {"kind": JOBSET}


class TestQueuedJobSet(Conformance):
    """spec.active of Kueue's Workload."""

    options: ClassVar[dict[str, Any]] = {"kind": JOBSET, "is_queued": True}
