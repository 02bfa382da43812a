"""The whole story on a real API server."""

from __future__ import annotations

import pytest

from tests.clients.receivers.kubernetes.test_end_to_end import (
    test_hacking_run_is_stopped_and_its_gpu_goes_to_the_job_that_waits,
)

pytestmark = pytest.mark.real

__all__ = ["test_hacking_run_is_stopped_and_its_gpu_goes_to_the_job_that_waits"]
