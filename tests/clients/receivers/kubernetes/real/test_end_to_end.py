"""The end-to-end test on a real API server."""

from __future__ import annotations

import pytest

from tests.clients.receivers.kubernetes.test_end_to_end import (
    test_stop_frees_a_gpu_for_a_waiting_job,
)

pytestmark = pytest.mark.real

__all__ = ["test_stop_frees_a_gpu_for_a_waiting_job"]
