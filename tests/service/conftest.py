"""Fixtures with projects to ingest into."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from evalstop_service.store import endpoints
from evalstop_service.store.database import Database

from tests.fixtures.projects import EVERY_EVENT
from tests.service.event_check import check_events
from tests.service.project_fixture import NOW, ProjectFixture, set_up_project


@pytest.fixture
def project(database: Database) -> Iterator[ProjectFixture]:
    """A project; afterwards its events are validated against their schemas."""
    yield set_up_project(database)
    check_events(database)


@pytest.fixture
def veto_project(database: Database) -> Iterator[ProjectFixture]:
    """A project with a veto window of one minute and an endpoint."""
    project = set_up_project(database, veto_window_seconds=60.0)
    with database.transaction() as tx:
        endpoints.add_endpoint(tx, project.id, url="http://127.0.0.1:9/", event_types=EVERY_EVENT, now=NOW)
    yield project
    check_events(database)
