"""Imports Schemathesis, which takes seconds in each process, only where its tests run."""

from __future__ import annotations

from pathlib import Path

import pytest

FILE = Path(__file__).parent / "test_conformance.py"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import a file all of whose tests are deselected; before any other of Schemathesis's, load its plugin."""
    if collection_path != FILE:
        return None
    if "not nightly" in config.option.markexpr:
        return True
    config.pluginmanager.import_plugin("schemathesis.pytest.plugin")
    return None
