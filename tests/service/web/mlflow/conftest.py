"""A server on each database, and a client of its MLflow API."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.fixtures.certificates import get_ssl_context
from tests.service.web.api.conftest import Service, admin, service
from tests.service.web.mlflow.rest_client import MlflowClient

__all__ = ["Service", "admin", "service"]


@pytest.fixture
def client(service: Service) -> Iterator[MlflowClient]:
    key = service.create_key(service.create_project())
    headers = {"Authorization": f"Bearer {key}"}
    url = f"{service.url}/mlflow/api/2.0/mlflow/"
    with httpx.Client(verify=get_ssl_context(), base_url=url, headers=headers, timeout=60, trust_env=False) as http:
        yield MlflowClient(http, service.open_client_with_key(key))
