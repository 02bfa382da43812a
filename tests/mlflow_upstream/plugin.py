"""A pytest plugin for MLflow's own tests: every server that a test starts is a fresh project of a running EvalStop.

It runs in an interpreter that has MLflow, without any package of ours. Requests of bare `requests.post` get their key
from a netrc file, which `requests` reads by itself.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES_ITS_DATABASE = "test_subprocess_inherit_tracking_uri"
"""Asks no server anything, and expects the name of its database back."""

_UPSTREAM = json.loads(os.environ["EVALSTOP_UPSTREAM"])
_URL: str = _UPSTREAM["url"]
_KEYS: list[str] = _UPSTREAM["keys"]


def _start_project() -> str:
    """Switch to the next project; returns the URL of the service."""
    key = _KEYS.pop()
    os.environ["MLFLOW_TRACKING_TOKEN"] = key
    Path(os.environ["NETRC"]).write_text(f"machine 127.0.0.1 login key password {key}\n")
    return _URL


class _Server:
    """A replacement of MLflow's server in a thread or process."""

    def __init__(self, *_arguments: Any, **_options: Any) -> None:
        pass

    def __enter__(self) -> str:
        return _start_project()

    def __exit__(self, *_error: object) -> None:
        pass


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep one variant of tests that run on several of MLflow's stores: here all are the same."""
    items[:] = [
        item for item in items if not hasattr(item, "callspec") or item.callspec.params.get("store_type") != "file"
    ]
    for module in {item.getparent(pytest.Module).obj for item in items}:  # type: ignore[union-attr]
        for name in ("ServerThread", "_init_server"):
            if hasattr(module, name):
                setattr(module, name, _Server)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Point tests on MLflow's own database to the service, after their fixtures chose that database."""
    import mlflow

    if item.name == NAMES_ITS_DATABASE:
        return (yield)
    with _redirected(mlflow):
        started = "mlflow_client" in getattr(item, "fixturenames", ())
        mlflow.set_tracking_uri(_URL if started else "sqlite:///")
        return (yield)


@contextmanager
def _redirected(mlflow: Any) -> Iterator[None]:
    """Replace each database URI that is set as tracking URI by a fresh project."""
    original = mlflow.set_tracking_uri

    def set_tracking_uri(uri: Any) -> None:
        original(_start_project() if str(uri).startswith("sqlite:") else uri)

    mlflow.set_tracking_uri = set_tracking_uri
    try:
        yield
    finally:
        mlflow.set_tracking_uri = original
