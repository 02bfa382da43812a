"""Fixtures of the store's tests."""

from __future__ import annotations

import pytest
from evalstop_service.store.database import Database

from tests.service.webhooks.delivery.fakes import SeededProject, seed_project


@pytest.fixture
def project(database: Database) -> SeededProject:
    """A project with a run."""
    return seed_project(database)
