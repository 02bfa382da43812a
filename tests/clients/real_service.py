"""A real service on an embedded database, and projects of its own for each test."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import evalstop
import httpx
from evalstop_client.run import Run
from evalstop_client.settings import Limits
from evalstop_service.clock import utc_now
from evalstop_service.store import projects
from evalstop_service.store.database import Database
from evalstop_service.store.keys import SCOPES

from tests.fixtures.certificates import get_ssl_context
from tests.fixtures.http_server import start_server
from tests.fixtures.projects import create_named_key, create_project

FALLING = (0.5, 0.9, 0.8, 0.7, 0.6)
"""Three declines: the policy `paper` stops at step 4."""


@dataclass(frozen=True)
class Project:
    """A project whose default policy is `paper` unless named otherwise, and a key with every scope."""

    url: str
    database: Database
    name: str
    key: str

    def create_key(self, *scopes: str) -> str:
        """Another key, with these scopes only."""
        return create_named_key(self.database, self.name, "narrow", scopes, utc_now())[1]

    def report_run(
        self, name: str, values: tuple[float, ...] = FALLING, *, with_checkpoints: bool = True, **terms: object
    ) -> Run:
        """Have a run report evals as a trainer does, and leave it open."""
        run = Run(name, url=self.url, key=self.key, limits=Limits(flush_seconds=60), **terms)  # type: ignore[arg-type]
        for step, value in enumerate(values):
            if with_checkpoints:
                run.checkpoint(f"file:///{step}", step=step)
            run.log({"eval": value}, step=step)
        assert run.flush()
        return run

    @property
    def api(self) -> evalstop.Api:
        """The project's API, for reading."""
        return evalstop.Api(self.url, self.key)

    @property
    def connection(self) -> dict[str, Any]:
        """The arguments of Run that name the service."""
        return {"url": self.url, "key": self.key}

    @contextmanager
    def open_client(self) -> Iterator[httpx.Client]:
        """An HTTP client of the API with the project's key."""
        headers = {"Authorization": f"Bearer {self.key}"}
        with httpx.Client(
            verify=get_ssl_context(), base_url=f"{self.url}/api/v1", headers=headers, timeout=60, trust_env=False
        ) as client:
            yield client


@contextmanager
def running_service(migrated_file: Path, folder: Path) -> Iterator[tuple[str, Database]]:
    """The URL of a service on a fresh database, and the database."""
    file = folder / "evalstop.db"
    shutil.copyfile(migrated_file, file)
    database = Database(f"sqlite:///{file}")
    with start_server(database) as url:
        yield url, database
    database.close()


def make_project(
    url: str, database: Database, mode: str, veto_window_seconds: float = 0.0, policy: str = "paper"
) -> Project:
    """A new project in this mode whose runs may all be stopped."""
    project = create_project(database, uuid.uuid4().hex, mode, veto_window_seconds, utc_now(), policy)
    with database.transaction() as tx:
        projects.update_project(tx, replace(project, stops_per_hour=None, stops_share=None))
    key = create_named_key(database, project.name, "test", SCOPES, utc_now())[1]
    return Project(url, database, project.name, key)


def find_eval_request(client: httpx.Client, run_id: str, request_id: str) -> dict[str, Any]:
    """A request to evaluate, as the service has it now."""
    items = client.get(f"/runs/{run_id}/eval-requests").raise_for_status().json()["items"]
    request: dict[str, Any] = next(item for item in items if item["id"] == request_id)
    return request
