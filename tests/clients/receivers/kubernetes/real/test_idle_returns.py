"""Who waits in a real API server, and parked workloads that run meanwhile."""

from __future__ import annotations

import pytest

from tests.clients.receivers.kubernetes.test_idle_returns import (  # noqa: F401  # they run here too
    test_parked_workload_runs_while_nobody_waits,
    test_pods_elsewhere_count_where_they_may_be_listed,
    test_pods_of_parked_workloads_do_not_wait,
    test_workloads_in_a_queue_of_kueue_wait,
)

pytestmark = pytest.mark.real
