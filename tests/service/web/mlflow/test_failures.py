"""Problems of the service as MLflow's errors, which decide whether its clients retry."""

from __future__ import annotations

import pytest
import sqlalchemy as sa
from evalstop_service.errors import Closed, Conflict, Invalid, NotFound, Overloaded
from evalstop_service.web.mlflow.protocol import convert_problem
from evalstop_service.web.problems import problem_of

RETRIED_STATUSES = {408, 429, 500, 502, 503, 504}
"""By `mlflow.utils.request_utils`, version 3.17."""


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (Overloaded(), 503, "TEMPORARILY_UNAVAILABLE"),
        (Closed(), 503, "TEMPORARILY_UNAVAILABLE"),
        (sa.exc.OperationalError("s", {}, Exception("away")), 503, "TEMPORARILY_UNAVAILABLE"),
        (NotFound("no run"), 404, "RESOURCE_DOES_NOT_EXIST"),
        (Invalid("no step"), 400, "INVALID_PARAMETER_VALUE"),
        (Conflict("pruned"), 409, "RESOURCE_CONFLICT"),
        (ZeroDivisionError(), 500, "INTERNAL_ERROR"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_only_temporary_problems_have_retried_statuses(error: Exception, status: int, code: str) -> None:
    """Clients retry a temporary failure, and raise an error that a retry would not fix."""
    failure = convert_problem(problem_of(error))
    assert (failure.status, failure.code) == (status, code)
    assert (failure.status in RETRIED_STATUSES) is (status >= 500)
