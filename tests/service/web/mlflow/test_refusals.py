"""What MLflow's clients are refused: in their words, at once, and by codes that they do not try again."""

from __future__ import annotations

import base64
import logging
from typing import Any

import httpx
import pytest

from tests.service.web.api.conftest import Service
from tests.service.web.mlflow.rest_client import Client, refused

BAD: list[tuple[str, Any]] = [
    ("runs/create", {"experiment_id": "no such"}),
    ("runs/log-metric", {"key": "m", "value": 1.0}),
    ("runs/log-metric", {"run_id": "%s", "key": "m", "value": "many"}),
    ("runs/log-metric", {"run_id": "%s", "key": "a(b)", "value": 1}),
    ("runs/log-metric", {"run_id": "0" * 32, "key": "m", "value": 1, "timestamp": 1}),
    ("runs/log-metric", {"run_id": "%s", "key": "m", "value": 1}),
    ("runs/log-batch", {"run_id": "0" * 32}),
    ("experiments/delete", {"experiment_id": "0"}),
    ("experiments/update", {"experiment_id": "1", "new_name": "b"}),
    ("runs/log-batch", {"run_id": "%s", "metrics": "m"}),
    ("runs/log-batch", {"run_id": "%s", "tags": [{"value": "v"}]}),
    ("runs/log-batch", []),
    ("runs/update", {"run_id": "%s", "status": "DONE"}),
    ("runs/set-tag", {"run_id": "../x", "key": "k", "value": "v"}),
    ("runs/delete-tag", {"run_id": "%s", "key": "mlflow.experiment"}),
    ("experiments/create", {"name": ""}),
    ("experiments/create", {"name": "a\x00"}),
]


@pytest.mark.parametrize(("verb", "body"), BAD)
def test_bad_input(client: Client, verb: str, body: Any) -> None:
    """What cannot be taken is refused at once, by a code that no client tries again, and says what is wrong."""
    run_id = client.run()
    if isinstance(body, dict) and body.get("run_id") == "%s":
        body = body | {"run_id": run_id}
    response = client.http.post(verb, json=body)
    assert response.status_code in (400, 404), response.text
    assert response.json()["error_code"] in ("INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST")
    assert len(response.json()["message"]) > 10


def test_no_json(client: Client) -> None:
    """A body that is no JSON is refused in MLflow's words."""
    headers = {"Content-Type": "application/json"}
    refused(client.http.post("runs/log-batch", content=b"{", headers=headers), 400, "INVALID_PARAMETER_VALUE")
    asked = {"run_id": client.run(), "metric_key": "a\x00"}
    refused(client.http.get("metrics/get-history", params=asked), 400, "INVALID_PARAMETER_VALUE")


def test_no_body_for_any_route(client: Client) -> None:
    """What is refused before any route is asked is refused in MLflow's words, and at once: it stays too large."""
    long = b" " * (8 * 2**20 + 1)
    said = refused(client.http.post("runs/log-batch", content=long), 400, "INVALID_PARAMETER_VALUE")
    assert "8388608 bytes" in said
    said = refused(client.http.post("runs/log-batch", content=iter([long])), 400, "INVALID_PARAMETER_VALUE")
    assert "8388608 bytes" in said
    said = refused(client.http.post("runs/log-batch", content=b"[" * 1_100_001), 400, "INVALID_PARAMETER_VALUE")
    assert "smaller batches" in said
    packed = {"Content-Encoding": "gzip"}
    said = refused(client.http.post("runs/log-batch", content=b"x", headers=packed), 400, "INVALID_PARAMETER_VALUE")
    assert "Content-Encoding" in said


def test_what_is_not_there(client: Client) -> None:
    """Registered models and traces are refused by name, at once."""
    message = refused(client.http.post("registered-models/create", json={"name": "m"}), 404, "ENDPOINT_NOT_FOUND")
    assert "registered-models/create" in message


def test_keys(service: Service, client: Client) -> None:
    """A key speaks as bearer or as password of any name; none, a wrong one, or one that may not, is told so."""
    run_id = client.run()
    project = service.create_project()
    ingest, read = service.create_key(project, "ingest"), service.create_key(project, "read")
    url = f"{client.http.base_url}experiments/get-by-name?experiment_name=Default"
    basic = base64.b64encode(f"anyone:{ingest}".encode()).decode()
    assert httpx.get(url, headers={"Authorization": f"Basic {basic}"}, trust_env=False).status_code == 200
    for header in (
        {},
        {"Authorization": "Bearer esk_no"},
        {"Authorization": "Basic !"},
        {"Authorization": "Basic YTo="},
    ):
        refused(httpx.get(url, headers=header, trust_env=False), 401, "UNAUTHENTICATED")
    body = {"run_id": run_id, "key": "m", "value": 1, "timestamp": 1}
    for key, status, code in ((read, 403, "PERMISSION_DENIED"), (ingest, 404, "RESOURCE_DOES_NOT_EXIST")):
        headers = {"Authorization": f"Bearer {key}"}
        response = httpx.post(f"{client.http.base_url}runs/log-metric", json=body, headers=headers, trust_env=False)
        refused(response, status, code)
    anonymous = httpx.post(f"{client.http.base_url}runs/log-batch", content=b"{", trust_env=False)
    refused(anonymous, 401, "UNAUTHENTICATED")


def test_a_refusal_is_no_fault(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    """What is refused is not logged as a fault of the service, and the connection stays for the next request."""
    body = {"run_id": "0" * 32, "key": "m", "value": 1, "timestamp": 1}
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            refused(client.http.post("runs/log-metric", json=body), 404, "RESOURCE_DOES_NOT_EXIST")
            refused(client.http.post("runs/log-metric", json=[]), 400, "INVALID_PARAMETER_VALUE")
            refused(client.http.post("runs/log-metric", content=b"{}"), 400, "INVALID_PARAMETER_VALUE")
    assert caplog.records == []
