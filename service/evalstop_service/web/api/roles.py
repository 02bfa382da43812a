"""Which metric plays which role: corrected for a run, and told by patterns for a project."""

from __future__ import annotations

from uuid import UUID

from fastapi import APIRouter
from pydantic import Field

from evalstop_service.ingest import Arrival, Corrected
from evalstop_service.projects import project_settings
from evalstop_service.projects.project_settings import RolePatterns
from evalstop_service.web.api.reading.json_body import JsonRoute
from evalstop_service.web.api.run_views import RunOut, run_out
from evalstop_service.web.api.runs import Roles, written_out
from evalstop_service.web.api.schemas import Body, ProjectOut
from evalstop_service.web.context import Admin, Commit, Db, Now, Operate

router = APIRouter(tags=["roles"], route_class=JsonRoute)


class MetricsIn(Body):
    """All metrics of a run that play a role."""

    metrics: Roles = Field(
        examples=[{"val-core/gsm8k/mean@4": {"role": "eval"}, "critic/score/mean": {"role": "proxy"}}]
    )


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
def set_role_patterns(body: RolePatterns, caller: Admin, database: Db, now: Now) -> ProjectOut:
    """Say by pattern which metrics play which role, in runs of the key's project whose trainers do not say it.

    Runs that are open take them up when a metric comes in for the first time.
    """
    project = project_settings.change_role_patterns(database, caller.project_id, caller.actor, body, now)
    return ProjectOut.model_validate(project)
