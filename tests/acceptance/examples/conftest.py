"""A running service for the examples, and their environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from evalstop_lab.service_process import Service

from tests.fixtures.forked_service import running_service


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A running `evalstop up`."""
    with running_service(tmp_path_factory.mktemp("service")) as service:
        yield service


def open_api(service: Service) -> httpx.Client:
    """A client of the service's API."""
    headers = {"Authorization": f"Bearer {service.key}"}
    return httpx.Client(base_url=f"{service.url}/api/v1", headers=headers, trust_env=False, timeout=60)


@pytest.fixture
def environment(service: Service, tmp_path: Path) -> dict[str, str]:
    """The environment of an example."""
    return build_environment(service, tmp_path)


def build_environment(service: Service, folder: Path) -> dict[str, str]:
    """The service's address and key, folders of the test's own, one thread a process, and no downloads."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("EVALSTOP_", "SLURM_"))}
    return inherited | {
        "EVALSTOP_URL": service.url,
        "EVALSTOP_KEY": service.key,
        "MLFLOW_TRACKING_URI": f"{service.url}/mlflow",
        "MLFLOW_TRACKING_TOKEN": service.key,
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
        # To list a model's requirements MLflow imports all of them again, for up to two minutes; then it assumes some.
        "MLFLOW_REQUIREMENTS_INFERENCE_TIMEOUT": "0",
        "HF_MLFLOW_LOG_ARTIFACTS": "1",
        "EVALSTOP_SPOOL": str(folder / "spool"),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "KERAS_BACKEND": "torch",
        "KERAS_HOME": str(folder / "keras"),
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "hub"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }
