"""The battery for receivers, on a real API server."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from evalstop_client.receivers.kubernetes.kinds import JOB, JOBSET

from tests.clients.receivers.conformance import Conformance
from tests.clients.receivers.kubernetes.cluster import KubernetesCluster, KubernetesLauncher

pytestmark = pytest.mark.real


@pytest.fixture
def launcher(request: pytest.FixtureRequest, kubernetes: KubernetesCluster) -> KubernetesLauncher:
    return KubernetesLauncher(kubernetes, **request.cls.setting)


class TestJob(Conformance):
    """parallelism 0, for this server cannot suspend a Job."""

    setting: ClassVar[dict[str, Any]] = {"kind": JOB}


class TestJobSetInAQueue(Conformance):
    """spec.active of Kueue's Workload."""

    setting: ClassVar[dict[str, Any]] = {"kind": JOBSET, "is_queued": True}


class TestDeletedJobSet(Conformance):
    """Deleted in the foreground, by the real garbage collector."""

    setting: ClassVar[dict[str, Any]] = {"kind": JOBSET, "options": {"stop_by": "delete"}}
