"""A client that is generated from the OpenAPI document has every operation and works with a real server."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
from evalstop_service.app import create_app
from evalstop_service.clock import utc_now
from evalstop_service.projects import api_keys
from evalstop_service.settings import Settings
from evalstop_service.store.database import Database

from tests.fixtures.http_server import start_server

pytestmark = [pytest.mark.real, pytest.mark.nightly]

# The generator does not support these content types; it treats them as bytes.
CONFIG = {
    "content_type_overrides": {
        "application/x-ndjson": "application/octet-stream",
        "text/plain": "application/octet-stream",
    }
}


def test_generated_client_works(embedded_database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """openapi-python-client generates a module for each operation without a warning; two of them are called."""
    document = create_app(Settings(), embedded_database, session_secret="none").openapi()
    (tmp_path / "openapi.json").write_text(json.dumps(document))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    command = [sys.executable, "-m", "openapi_python_client", "generate", "--path", "openapi.json", "--meta", "none"]
    command += ["--output-path", "generated_evalstop", "--config", "config.json", "--fail-on-warning"]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # the generator calls ruff
    completed = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    monkeypatch.syspath_prepend(str(tmp_path))
    package = importlib.import_module("generated_evalstop")
    modules = [item.name for item in pkgutil.walk_packages(package.__path__, "generated_evalstop.")]
    loaded = [importlib.import_module(name) for name in modules]
    operations = [operation for methods in document["paths"].values() for operation in methods.values()]
    assert sum(hasattr(module, "sync_detailed") for module in loaded) == len(operations) > 60

    key = api_keys.create_first_key(embedded_database, utc_now())
    open_run = importlib.import_module("generated_evalstop.api.runs.open_run")
    list_runs = importlib.import_module("generated_evalstop.api.runs.list_runs")
    body = importlib.import_module("generated_evalstop.models").RunIn(name="ppo-7b-seed3")
    with (
        start_server(embedded_database) as url,
        package.AuthenticatedClient(base_url=url, token=key, httpx_args={"trust_env": False}) as client,
    ):
        opened = open_run.sync(client=client, body=body)
        assert [run.id for run in list_runs.sync(client=client).items] == [opened.id]
