"""Routes of metric roles: corrections of a run, and patterns of a project."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import Field

from evalstop_service.ingest import Message, RolesCorrected
from evalstop_service.projects import project_settings
from evalstop_service.projects.project_settings import RolePatterns
from evalstop_service.web.api.reading.json_body import JsonRoute
from evalstop_service.web.api.run_views import RunOut, view_run
from evalstop_service.web.api.runs import Roles, complete_directions
from evalstop_service.web.api.schemas import Body, ProjectOut, RunId
from evalstop_service.web.context import Admin, Commit, Db, Now, Operate

router = APIRouter(route_class=JsonRoute)


class MetricsIn(Body):
    """All metrics of a run that have a role."""

    metrics: Roles = Field(
        description="by metric; those that are not named lose their roles",
        examples=[{"val-core/gsm8k/mean@4": {"role": "eval"}, "critic/score/mean": {"role": "proxy"}}],
    )


@router.patch("/runs/{run_id}/metrics", tags=["runs"])
def correct_run_metrics(
    run_id: RunId, body: MetricsIn, caller: Operate, committer: Commit, database: Db, now: Now
) -> RunOut:
    """Set the roles of all metrics. The run is judged again from its first observation.

    Automatic recognition is turned off for the run.
    """
    correction = RolesCorrected(complete_directions(body.metrics), caller.actor)
    receipt = committer.submit_and_wait(Message(caller.project_id, run_id, correction))
    with database.reading() as tx:
        return view_run(tx, receipt.run, now)


@router.put("/project/role-patterns", tags=["projects"])
def set_role_patterns(body: RolePatterns, caller: Admin, database: Db, now: Now) -> ProjectOut:
    """Set the role patterns of the key's project, for runs whose trainer sets no roles.

    Open runs apply them when they report a new metric.
    """
    project = project_settings.change_role_patterns(database, caller.author(now), body)
    return ProjectOut.model_validate(project)
