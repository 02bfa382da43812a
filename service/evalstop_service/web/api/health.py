"""Liveness and readiness probes."""

from __future__ import annotations

from pydantic import Field

from evalstop_service.store import schema
from evalstop_service.store.database import Database
from evalstop_service.web.api.json_body import create_router
from evalstop_service.web.api.schemas import Answer
from evalstop_service.web.context import Commit, Db
from evalstop_service.web.limits import in_thread
from evalstop_service.web.problem_kinds import ProblemKind
from evalstop_service.web.problems import Problem

router = create_router("health", prefix="")


class Health(Answer):
    """The probe succeeded."""

    status: str = Field("ok", description="always ok; a failing probe returns a problem")


@router.get("/livez")
async def check_liveness() -> Health:
    """The process is running."""
    return Health()


@router.get("/readyz")
async def check_readiness(database: Db, committer: Commit) -> Health:
    """The schema is up to date, and requests and observations, each on connections of their own, may be written."""
    await _check_connection(database)
    await committer.read(schema.require_writing)
    return Health()


@in_thread
def _check_connection(database: Database) -> None:
    revision = schema.current_revision(database)
    if not schema.is_served(revision):
        raise Problem(
            503,
            ProblemKind.SCHEMA_TOO_OLD,
            f"the schema is at {revision}, but {schema.needed_revision()} is required; run `evalstop migrate`",
        )
    with database.reading() as tx:
        schema.require_writing(tx)
