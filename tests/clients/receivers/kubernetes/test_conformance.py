"""The conformance suite on a fake API server, for each way to suspend a workload."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from evalstop_client.receivers.kubernetes.kinds import JOB

from tests.clients.receivers.conformance import Conformance
from tests.clients.receivers.kubernetes.cluster import KubernetesCluster, KubernetesLauncher

pytestmark = pytest.mark.slow


@pytest.fixture
def launcher(request: pytest.FixtureRequest, kubernetes: KubernetesCluster) -> KubernetesLauncher:
    return KubernetesLauncher(kubernetes, **request.cls.options)


class TestSuspendedJob(Conformance):
    """spec.suspend of a batch/v1 Job."""

    options: ClassVar[dict[str, Any]] = {"kind": JOB}


@pytest.mark.nightly
class TestQueuedJob(Conformance):
    """spec.active of Kueue's Workload."""

    options: ClassVar[dict[str, Any]] = {"kind": JOB, "is_queued": True}
