"""MLflow's words for where a run stands."""

from __future__ import annotations

import pytest
from evalstop_service.rules.statuses import RunStatus
from evalstop_service.web.mlflow.responses import find_status


@pytest.mark.parametrize("status", RunStatus)
def test_every_status_has_a_word(status: RunStatus) -> None:
    """A client of MLflow understands five words, and each status of ours is one of them."""
    assert find_status(status) in ("RUNNING", "SCHEDULED", "FINISHED", "FAILED", "KILLED")


def test_a_parked_run_is_neither_running_nor_over() -> None:
    """Its job waits to be started again."""
    assert find_status(RunStatus.PARKED) == "SCHEDULED"
