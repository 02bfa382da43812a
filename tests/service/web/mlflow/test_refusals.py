"""Invalid requests of MLflow's clients: refused in MLflow's format, with statuses that are not retried."""

from __future__ import annotations

import base64
import logging
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from evalstop_service.errors import Conflict, Invalid, NotFound, Overloaded
from evalstop_service.web.mlflow.protocol import convert_problem
from evalstop_service.web.problems import problem_of

from tests.service.web.api.conftest import Service
from tests.service.web.mlflow.conftest import MlflowClient, expect_error

INVALID_REQUESTS: list[tuple[str, Any]] = [
    ("runs/create", {"experiment_id": "no such"}),
    ("runs/log-metric", {"key": "m", "value": 1.0}),
    ("runs/log-metric", {"run_id": "%s", "key": "m", "value": "many"}),
    ("runs/log-metric", {"run_id": "%s", "key": "a(b)", "value": 1}),
    ("runs/log-metric", {"run_id": "0" * 32, "key": "m", "value": 1, "timestamp": 1}),
    ("runs/log-metric", {"run_id": "%s", "key": "m", "value": 1}),
    ("runs/log-batch", {"run_id": "0" * 32}),
    ("runs/log-batch", {"run_id": "%s", "metrics": "m"}),
    ("runs/log-batch", {"run_id": "%s", "tags": [{"value": "v"}]}),
    ("runs/log-batch", []),
    ("runs/update", {"run_id": "%s", "status": "DONE"}),
    ("runs/set-tag", {"run_id": "../x", "key": "k", "value": "v"}),
    ("experiments/create", {"name": ""}),
    ("experiments/create", {"name": "a\x00"}),
    ("runs/search", {"experiment_ids": ["0"], "run_view_type": "DELETED_ONLY"}),
    ("runs/outputs", {"run_id": "%s", "models": [{"model_id": "m-1", "step": 1}]}),
]


@pytest.mark.parametrize(("verb", "body"), INVALID_REQUESTS)
def test_invalid_request_is_refused_without_a_retry(client: MlflowClient, verb: str, body: Any) -> None:
    """The status and code make no client retry, and the message says what is wrong."""
    run_id = client.create_run()
    if isinstance(body, dict) and body.get("run_id") == "%s":
        body = body | {"run_id": run_id}
    response = client.http.post(verb, json=body)
    refusals = ((400, "INVALID_PARAMETER_VALUE"), (404, "RESOURCE_DOES_NOT_EXIST"))
    assert (response.status_code, response.json()["error_code"]) in refusals, response.text
    assert len(response.json()["message"]) > 10


def test_malformed_body_and_key_are_refused(client: MlflowClient) -> None:
    """A body that is not JSON, and a metric key with NUL, are MLflow errors."""
    headers = {"Content-Type": "application/json"}
    expect_error(client.http.post("runs/log-batch", content=b"{", headers=headers), 400, "INVALID_PARAMETER_VALUE")
    params = {"run_id": client.create_run(), "metric_key": "a\x00"}
    expect_error(client.http.get("metrics/get-history", params=params), 400, "INVALID_PARAMETER_VALUE")


def test_oversized_and_compressed_bodies_are_refused(client: MlflowClient) -> None:
    """Bodies that no route would read are refused in MLflow's format, with a status that is not retried."""
    oversized = b" " * (8 * 2**20 + 1)
    message = expect_error(client.http.post("runs/log-batch", content=oversized), 400, "INVALID_PARAMETER_VALUE")
    assert "8388608 bytes" in message
    message = expect_error(
        client.http.post("runs/log-batch", content=iter([oversized])), 400, "INVALID_PARAMETER_VALUE"
    )
    assert "8388608 bytes" in message
    message = expect_error(client.http.post("runs/log-batch", content=b"[" * 1_100_001), 400, "INVALID_PARAMETER_VALUE")
    assert "smaller batches" in message
    headers = {"Content-Encoding": "gzip"}
    message = expect_error(
        client.http.post("runs/log-batch", content=b"x", headers=headers), 400, "INVALID_PARAMETER_VALUE"
    )
    assert "Content-Encoding" in message


def test_unsupported_endpoint_is_named_in_the_error(client: MlflowClient) -> None:
    """Registered models do not exist here, and nothing is deleted."""
    for verb in ("registered-models/create", "runs/delete", "experiments/delete"):
        message = expect_error(client.http.post(verb, json={}), 404, "ENDPOINT_NOT_FOUND")
        assert verb in message
        assert "experiments and runs" in message


def test_key_is_accepted_as_bearer_or_basic_password(service: Service, client: MlflowClient) -> None:
    """A missing, wrong or insufficient key is an MLflow error."""
    run_id = client.create_run()
    project = service.create_project()
    ingest, read = service.create_key(project, "ingest"), service.create_key(project, "read")
    url = f"{client.http.base_url}experiments/get-by-name?experiment_name=Default"
    basic = base64.b64encode(f"anyone:{ingest}".encode()).decode()
    assert httpx.get(url, headers={"Authorization": f"Basic {basic}"}, trust_env=False, timeout=60).status_code == 200
    for header in (
        {},
        {"Authorization": "Bearer esk_no"},
        {"Authorization": "Basic !"},
        {"Authorization": "Basic YTo="},
    ):
        expect_error(httpx.get(url, headers=header, trust_env=False, timeout=60), 401, "UNAUTHENTICATED")
    body = {"run_id": run_id, "key": "m", "value": 1, "timestamp": 1}
    for key, status, code in ((read, 403, "PERMISSION_DENIED"), (ingest, 404, "RESOURCE_DOES_NOT_EXIST")):
        headers = {"Authorization": f"Bearer {key}"}
        response = httpx.post(
            f"{client.http.base_url}runs/log-metric", json=body, headers=headers, trust_env=False, timeout=60
        )
        expect_error(response, status, code)
    anonymous = httpx.post(f"{client.http.base_url}runs/log-batch", content=b"{", trust_env=False, timeout=60)
    expect_error(anonymous, 401, "UNAUTHENTICATED")


def test_refused_request_logs_no_warning(client: MlflowClient, caplog: pytest.LogCaptureFixture) -> None:
    """A refusal is not logged, and the connection stays open."""
    body = {"run_id": "0" * 32, "key": "m", "value": 1, "timestamp": 1}
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            expect_error(client.http.post("runs/log-metric", json=body), 404, "RESOURCE_DOES_NOT_EXIST")
            expect_error(client.http.post("runs/log-metric", json=[]), 400, "INVALID_PARAMETER_VALUE")
            expect_error(client.http.post("runs/log-metric", content=b"{}"), 400, "INVALID_PARAMETER_VALUE")
    assert caplog.records == []


RETRIED_STATUSES = {408, 429, 500, 502, 503, 504}
"""By `mlflow.utils.request_utils`, version 3.17."""


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (Overloaded(), 503, "TEMPORARILY_UNAVAILABLE"),
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
