"""A server on each database, and a client of its MLflow REST API."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.fixtures.certificates import get_ssl_context
from tests.service.web.api.conftest import Service, admin, service

__all__ = ["Service", "admin", "service"]


@pytest.fixture
def client(service: Service) -> Iterator[MlflowClient]:
    key = service.create_key(service.create_project())
    headers = {"Authorization": f"Bearer {key}"}
    url = f"{service.url}/mlflow/api/2.0/mlflow/"
    with httpx.Client(verify=get_ssl_context(), base_url=url, headers=headers, timeout=60, trust_env=False) as http:
        yield MlflowClient(http, service.open_client_with_key(key))


@dataclass
class MlflowClient:
    """Calls MLflow's API under /mlflow; `api` calls the service's own API with the same key."""

    http: httpx.Client
    api: httpx.Client

    def post(self, verb: str, body: dict[str, Any]) -> dict[str, Any]:
        return expect_json(self.http.post(verb, json=body))

    def get(self, verb: str, **params: str | int) -> dict[str, Any]:
        return expect_json(self.http.get(verb, params=params))

    def create_run(self, **body: Any) -> str:
        run_id: str = self.post("runs/create", {"experiment_id": "0"} | body)["run"]["info"]["run_id"]
        return run_id

    def get_tags(self, run_id: str) -> dict[str, str]:
        run = self.get("runs/get", run_id=run_id)["run"]
        return {tag["key"]: tag["value"] for tag in run["data"]["tags"]}

    def get_run(self, run_id: str) -> dict[str, Any]:
        """The run in the service's own API."""
        return expect_json(self.api.get(f"/runs/{run_id}"))


def expect_json(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code in (200, 201), response.text
    document: dict[str, Any] = response.json()
    return document


def expect_error(response: httpx.Response, status: int, code: str) -> str:
    """The message of an error in MLflow's format; fails unless it has this status and code."""
    assert (response.status_code, response.json()["error_code"]) == (status, code), response.text
    message: str = response.json()["message"]
    assert len(message) > 10
    return message
