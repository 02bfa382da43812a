"""What the tests of the store share."""

from __future__ import annotations

import pytest
from evalstop_service.store.database import Database

from tests.service.webhooks.delivery.fakes import Scene, a_scene


@pytest.fixture
def scene(database: Database) -> Scene:
    """A project with a run."""
    return a_scene(database)
