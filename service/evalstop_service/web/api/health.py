"""Liveness and readiness probes."""

from __future__ import annotations

import logging

import sqlalchemy as sa
from fastapi import APIRouter
from pydantic import Field

from evalstop_service.store import schema
from evalstop_service.web.api.json_body import JsonRoute
from evalstop_service.web.api.schemas import Answer
from evalstop_service.web.context import Db
from evalstop_service.web.problem_kinds import ProblemKind
from evalstop_service.web.problems import Problem

log = logging.getLogger(__name__)

router = APIRouter(tags=["health"], route_class=JsonRoute)


class Health(Answer):
    """The probe succeeded."""

    status: str = Field("ok", description="always ok; a failing probe returns a problem")


@router.get("/livez")
async def check_liveness() -> Health:
    """The process is running."""
    return Health()


@router.get("/readyz")
def check_readiness(database: Db) -> Health:
    """The database answers and its schema is up to date."""
    try:
        revision = schema.current_revision(database)
    except sa.exc.SQLAlchemyError as error:
        log.warning("the database does not answer: %s", error)
        raise Problem(503, ProblemKind.DATABASE_AWAY, "the service's log has the reason") from error
    if not schema.is_served(revision):
        raise Problem(
            503,
            ProblemKind.SCHEMA_TOO_OLD,
            f"the schema is at {revision}, but {schema.needed_revision()} is required; run `evalstop migrate`",
        )
    return Health()
