"""A server on each database for the whole session, projects in it, and clients that hold keys."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
import pytest
from evalstop_service.clock import utc_now
from evalstop_service.projects import api_keys
from evalstop_service.store import projects
from evalstop_service.store.database import Database
from evalstop_service.store.keys import SCOPES

from tests.conftest import BACKENDS, ClonePostgres
from tests.fixtures.http import certificates
from tests.fixtures.projects import create_project
from tests.fixtures.serving import serving
from tests.service.event_check import check_events
from tests.service.web.api.speaking import World, populate

ON_ONE_DATABASE = [pytest.mark.usefixtures("service"), pytest.mark.parametrize("service", ["sqlite"], indirect=True)]
"""For what is answered before a database is asked, or by statements that other tests have both databases execute."""


@dataclass
class Service:
    """A server that runs, and its database."""

    url: str
    database: Database
    clients: list[httpx.Client] = field(default_factory=list)

    def project(self, mode: str = "enforce", veto_window_seconds: float = 0.0) -> str:
        """The name of a new project, which may have all its runs stopped."""
        project = create_project(self.database, uuid.uuid4().hex, mode, veto_window_seconds, utc_now(), "paper")
        with self.database.transaction() as tx:
            projects.update_project(tx, replace(project, stops_per_hour=None, stops_share=None))
        return project.name

    def key(self, project: str | None, *scopes: str) -> str:
        """A key to a project, or (None) to the installation."""
        return api_keys.create_named_key(self.database, project, "test", scopes or SCOPES, utc_now())[1]

    def client(self, key: str | None) -> httpx.Client:
        """A client that sends this key to paths below /api/v1."""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        client = httpx.Client(
            verify=certificates(), base_url=f"{self.url}/api/v1", headers=headers, timeout=60, trust_env=False
        )
        self.clients.append(client)
        return client


@pytest.fixture(scope="session", params=BACKENDS)
def service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A server on the embedded database, then one on PostgreSQL."""
    if request.param == "sqlite":
        file: Path = tmp_path_factory.mktemp("api") / "evalstop.db"
        shutil.copyfile(request.getfixturevalue("migrated_file"), file)
        url = f"sqlite:///{file}"
    else:
        clone: ClonePostgres = request.getfixturevalue("clone_postgres")
        url = clone()
    database = Database(url)
    with serving(database) as address:
        service = Service(address, database)
        yield service
        for client in service.clients:
            client.close()
    check_events(database)
    database.close()


@pytest.fixture
def admin(service: Service) -> httpx.Client:
    """A client that may do everything in a new project whose stops are carried out at once."""
    return service.client(service.key(service.project()))


@pytest.fixture(scope="module")
def everything(service: Service) -> tuple[httpx.Client, World]:
    """A project with one of everything, and a client that may do everything in it."""
    client = service.client(service.key(service.project()))
    return client, populate(client)


def client_for(service: Service, everything: tuple[httpx.Client, World], route: tuple[str, str]) -> httpx.Client:
    return service.client(service.key(None, "admin")) if route[1].startswith("/projects") else everything[0]
