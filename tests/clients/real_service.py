"""A real service on an embedded database, with projects of a test's own, for what reads and decides."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import evalstop
from evalstop_client.run import Run
from evalstop_service.clock import utc_now
from evalstop_service.projects import api_keys
from evalstop_service.store import projects
from evalstop_service.store.database import Database
from evalstop_service.store.keys import SCOPES

from tests.fixtures.http_server import start_server
from tests.fixtures.projects import create_project

FALLING = (0.5, 0.9, 0.8, 0.7, 0.6)
"""Three declines: the paper's rule stops at step 4."""


@dataclass(frozen=True)
class Project:
    """A project with the policy `paper`, and a key that may do everything in it."""

    url: str
    database: Database
    name: str
    key: str

    def narrow_key(self, *scopes: str) -> str:
        """Another key, with these scopes alone."""
        return api_keys.create_named_key(self.database, self.name, "narrow", scopes, utc_now())[1]

    def report(self, name: str, values: tuple[float, ...] = FALLING, *, saves: bool = True, **terms: object) -> Run:
        """Have a run report evals, as a trainer does, and leave it open."""
        run = Run(name, url=self.url, key=self.key, flush_seconds=60, **terms)  # type: ignore[arg-type]
        for step, value in enumerate(values):
            if saves:
                run.checkpoint(f"file:///{step}", step=step)
            run.log({"eval": value}, step=step)
        assert run.flush()
        return run

    @property
    def api(self) -> evalstop.Api:
        """The project, to be read."""
        return evalstop.Api(self.url, self.key)


@contextmanager
def running_service(migrated_file: Path, folder: Path) -> Iterator[tuple[str, Database]]:
    """The URL of a service on a fresh database, and the database."""
    file = folder / "evalstop.db"
    shutil.copyfile(migrated_file, file)
    database = Database(f"sqlite:///{file}")
    with start_server(database) as url:
        yield url, database
    database.close()


def make_project(url: str, database: Database, mode: str, veto_window_seconds: float = 0.0) -> Project:
    """A new project whose runs are of this mode and may all be stopped."""
    made = create_project(database, uuid.uuid4().hex, mode, veto_window_seconds, utc_now(), "paper")
    with database.transaction() as tx:
        projects.update_project(tx, replace(made, stops_per_hour=None, stops_share=None))
    key = api_keys.create_named_key(database, made.name, "test", SCOPES, utc_now())[1]
    return Project(url, database, made.name, key)
