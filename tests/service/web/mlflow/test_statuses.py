"""Run statuses in MLflow's API."""

from __future__ import annotations

import pytest
from evalstop_service.domain.statuses import RunStatus
from evalstop_service.store.mlflow import STATUSES


@pytest.mark.parametrize("status", RunStatus)
def test_every_status_maps_to_an_mlflow_status(status: RunStatus) -> None:
    """MLflow's clients know five statuses."""
    assert STATUSES[status] in ("RUNNING", "SCHEDULED", "FINISHED", "FAILED", "KILLED")


def test_parked_run_is_scheduled() -> None:
    """A parked run is neither running nor ended, as its job waits to be started again."""
    assert STATUSES[RunStatus.PARKED] == "SCHEDULED"
