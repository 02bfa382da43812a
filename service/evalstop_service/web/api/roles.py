"""Which metric plays which role: corrected for a run, and told by patterns for a project."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter
from pydantic import AfterValidator, Field

from evalstop_service.ingest import Arrival, Corrected
from evalstop_service.store import audit, projects
from evalstop_service.store.database import Database
from evalstop_service.store.projects import Project
from evalstop_service.web.api.reading.json_body import JsonRoute
from evalstop_service.web.api.run_views import RunOut, run_out
from evalstop_service.web.api.runs import Roles, written_out
from evalstop_service.web.api.schemas import Body, Name, ProjectOut, Role, from_texts
from evalstop_service.web.context import Admin, Commit, Db, Now, Operate

router = APIRouter(tags=["roles"], route_class=JsonRoute)


def _closed(pattern: str) -> str:
    if pattern.count("[") > pattern.count("]"):
        raise ValueError("a [ that is not closed; write [[] for the character itself")
    return pattern


class MetricsIn(Body):
    """All metrics of a run that play a role."""

    metrics: Roles = Field(
        examples=[{"val-core/gsm8k/mean@4": {"role": "eval"}, "critic/score/mean": {"role": "proxy"}}]
    )


class Pattern(Role):
    """The role of all metrics whose name fits."""

    pattern: Annotated[Name, AfterValidator(_closed)] = Field(
        description="* is any text, ? any character, [ab] one of these; upper and lower case differ",
        examples=["val-core/*/mean@*"],
    )


class PatternsIn(Body):
    """The patterns of a project: the first that fits a name counts, and of a role the metric that fits first."""

    role_patterns: Annotated[list[Pattern], Field(max_length=100)]


@router.patch("/runs/{run_id}/metrics", tags=["runs"])
def correct_metrics(
    run_id: UUID, body: MetricsIn, caller: Operate, committer: Commit, database: Db, now: Now
) -> RunOut:
    """Say which metrics play which role: these and no others. The run is judged anew from its first observation on.

    What was recognised no longer counts, and nothing is recognised in this run from now on.
    """
    news = Corrected(written_out(body.metrics), caller.actor)
    receipt = committer.take(Arrival(caller.project_id, run_id, news))
    with database.reading() as tx:
        return run_out(tx, receipt.run, now)


@router.put("/project/role-patterns", tags=["projects"])
def set_role_patterns(body: PatternsIn, caller: Admin, database: Db, now: Now) -> ProjectOut:
    """Say by pattern which metrics play which role, in runs of the key's project whose trainers do not say it.

    Runs that are open take them up when a metric comes in for the first time.
    """
    return ProjectOut.model_validate(_change(database, caller.project_id, caller.actor, body, now))


def change_patterns(
    database: Database, project_id: UUID, actor: str, said: Mapping[str, Any], now: datetime
) -> Project:
    """Change the patterns, given as texts, by the same rules; raises Invalid."""
    return _change(database, project_id, actor, from_texts(PatternsIn, said), now)


def _change(database: Database, project_id: UUID, actor: str, body: PatternsIn, now: datetime) -> Project:
    patterns = [pattern.model_dump(exclude_none=True) for pattern in body.role_patterns]
    with database.transaction() as tx:
        project = replace(projects.lock(tx, project_id), role_patterns=patterns)
        projects.change(tx, project)
        details = {"role_patterns": patterns}
        audit.record(tx, project.id, actor, "project.changed", f"project {project.name}", details, now)
    return project
