"""A real service whose runs ask to evaluate now."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
from evalstop_service.clock import utc_now
from evalstop_service.projects import api_keys
from evalstop_service.store.database import Database
from evalstop_service.store.keys import SCOPES

from tests.fixtures.http_server import start_server
from tests.fixtures.projects import create_project
from tests.service.web.api.api_calls import expect_json


@contextmanager
def evaluating_service(migrated_file: Path, folder: Path) -> Iterator[httpx.Client]:
    """A client of a service on the embedded database, in a project of its own."""
    file = folder / "evalstop.db"
    shutil.copyfile(migrated_file, file)
    with closing(Database(f"sqlite:///{file}")) as database:
        project = create_project(database, "evaluating", "enforce", 0.0, utc_now(), "early")
        key = api_keys.create_named_key(database, project.name, "test", SCOPES, utc_now())[1]
        with start_server(database) as address:
            headers = {"Authorization": f"Bearer {key}"}
            with httpx.Client(base_url=f"{address}/api/v1", headers=headers, timeout=60, trust_env=False) as client:
                yield client


def place_of(api: httpx.Client) -> dict[str, Any]:
    """What a client of the same project is given."""
    url = str(api.base_url).rstrip("/").removesuffix("/api/v1")
    return {"url": url, "key": api.headers["Authorization"].removeprefix("Bearer ")}


def find_request(api: httpx.Client, run_id: str, request_id: str) -> dict[str, Any]:
    """A request as it is now."""
    items = expect_json(api.get(f"/runs/{run_id}/eval-requests"), 200)["items"]
    found: dict[str, Any] = next(item for item in items if item["id"] == request_id)
    return found
