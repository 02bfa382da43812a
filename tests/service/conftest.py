"""Projects to ingest into."""

from __future__ import annotations

import pytest
from evalstop_service.store import endpoints
from evalstop_service.store.database import Database

from tests.service.scenes import NOW, Scene, set_up


@pytest.fixture
def scene(database: Database) -> Scene:
    return set_up(database)


@pytest.fixture
def graceful(database: Database) -> Scene:
    """A project whose stops wait a minute for a veto, with a subscribed endpoint."""
    scene = set_up(database, grace_seconds=60.0)
    with database.transaction() as tx:
        endpoints.add(tx, scene.project_id, url="http://127.0.0.1:9/", event_types=["*"], now=NOW)
    return scene
