"""A server for the whole session on each database, and clients of projects on it."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
import pytest
from evalstop_service.clock import utc_now
from evalstop_service.settings import Settings
from evalstop_service.store import projects
from evalstop_service.store.database import Database
from evalstop_service.store.keys import SCOPES

from tests.conftest import BACKENDS, ClonePostgres
from tests.fixtures.certificates import get_ssl_context
from tests.fixtures.http_server import start_server
from tests.fixtures.projects import create_named_key, create_project
from tests.service.event_check import check_events
from tests.service.web.api.api_calls import Resources, create_resources

ON_SQLITE = [pytest.mark.usefixtures("service"), pytest.mark.parametrize("service", ["sqlite"], indirect=True)]
"""For requests that are answered before the database is used, or whose statements other tests run on both databases."""


@dataclass
class Service:
    """A running server and its database."""

    url: str
    database: Database
    clients: list[httpx.Client] = field(default_factory=list)

    def create_project(self, mode: str = "enforce", veto_window_seconds: float = 0.0) -> str:
        """Create a project without limits on stops, and return its name."""
        project = create_project(self.database, uuid.uuid4().hex, mode, veto_window_seconds, utc_now(), "paper")
        with self.database.transaction() as tx:
            projects.update_project(tx, replace(project, stops_per_hour=None, stops_share=None))
        return project.name

    def create_key(self, project: str | None, *scopes: str) -> str:
        """Create a key to a project, or to the installation if the project is None."""
        return create_named_key(self.database, project, "test", scopes or SCOPES, utc_now())[1]

    def open_client(self, project: str | None, *scopes: str) -> httpx.Client:
        """A client with a new key to a project, or to the installation if the project is None."""
        return self.open_client_with_key(self.create_key(project, *scopes))

    def open_client_with_key(self, key: str | None) -> httpx.Client:
        """A client that sends this key, or none, to paths under /api/v1."""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        client = httpx.Client(
            verify=get_ssl_context(), base_url=f"{self.url}/api/v1", headers=headers, timeout=60, trust_env=False
        )
        self.clients.append(client)
        return client


@pytest.fixture(scope="session", params=BACKENDS)
def service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A server on SQLite, then one on PostgreSQL."""
    if request.param == "sqlite":
        file: Path = tmp_path_factory.mktemp("api") / "evalstop.db"
        shutil.copyfile(request.getfixturevalue("migrated_file"), file)
        url = f"sqlite:///{file}"
    else:
        clone: ClonePostgres = request.getfixturevalue("clone_postgres")
        url = clone()
    database = Database(url)
    with start_server(database, Settings(trusted_proxies="127.0.0.1")) as address:
        service = Service(address, database)
        yield service
        for client in service.clients:
            client.close()
    check_events(database)
    database.close()


@pytest.fixture
def admin(service: Service) -> httpx.Client:
    """A client with an admin key to a new project that enforces stops without a veto window."""
    return service.open_client(service.create_project())


@pytest.fixture(scope="module")
def admin_and_resources(service: Service) -> tuple[httpx.Client, Resources]:
    """A client with an admin key to a project that has one resource of each kind, and the ids of these."""
    client = service.open_client(service.create_project())
    return client, create_resources(client)


def client_for_route(
    service: Service, admin_and_resources: tuple[httpx.Client, Resources], route: tuple[str, str]
) -> httpx.Client:
    """The admin client of the project, or one with a key to the installation for routes under /projects."""
    return service.open_client(None, "admin") if route[1].startswith("/projects") else admin_and_resources[0]
