"""Routes of metric roles: the metrics of a run, corrections, and a project's patterns."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import Field

from evalstop_service.domain.fields import Body
from evalstop_service.ingest import Message, RolesCorrected
from evalstop_service.projects import project_settings
from evalstop_service.projects.project_settings import RolePatterns
from evalstop_service.runs.watched_metrics import list_watched
from evalstop_service.store import observations, projects, runs
from evalstop_service.store.observations import LatestObservation
from evalstop_service.web.api.declared_roles import Roles, complete_directions
from evalstop_service.web.api.json_body import JsonRoute
from evalstop_service.web.api.run_views import RunOut, view_run
from evalstop_service.web.api.schemas import Answer, Items, ProjectOut, RunId, Stored, answers
from evalstop_service.web.context import Admin, Commit, Ctx, Db, Now, Operate, Read, allowed

router = APIRouter(route_class=JsonRoute)


class MetricsIn(Body):
    """All metrics of a run that have a role."""

    metrics: Roles = Field(
        description="by metric; metrics that are not named lose their roles",
        examples=[{"val-core/gsm8k/mean@4": {"role": "eval"}, "critic/score/mean": {"role": "proxy"}}],
    )


@answers(LatestObservation)
class MetricOut(Answer):
    """A metric that a run has reported."""

    role: str | None = Field(description="eval, proxy, kl or loss; null: it is stored but not watched")
    value: Stored = Field(description="value at that step")


@router.get("/runs/{run_id}/metrics", tags=["runs"])
def list_run_metrics(run_id: RunId, caller: Read, database: Db) -> Items[MetricOut]:
    """Every metric that the run has reported, with its role and its last value, by name."""
    with database.reading() as tx:
        roles = list_watched(runs.load_run(tx, caller.project_id, run_id))
        latest = observations.list_latest(tx, run_id)
    items = [vars(item) | {"role": roles[item.metric]["role"] if item.metric in roles else None} for item in latest]
    return Items[MetricOut].model_validate({"items": items})


@router.patch("/runs/{run_id}/metrics", tags=["runs"])
def correct_run_metrics(
    run_id: RunId, body: MetricsIn, caller: Operate, committer: Commit, context: Ctx, database: Db, now: Now
) -> RunOut:
    """Set the roles of all metrics. The run is judged again from its first observation.

    Automatic recognition is turned off for the run. In a project with `second_person` this needs the scope `admin`.
    """
    with database.reading() as tx:
        if projects.get_project(tx, caller.project_id).second_person:
            allowed(caller.key, "admin")
    correction = RolesCorrected(complete_directions(body.metrics), caller.actor)
    receipt = committer.submit_and_wait(Message(caller.project_id, run_id, correction))
    with database.reading() as tx:
        return view_run(tx, receipt.run, context, now)


@router.put("/project/role-patterns", tags=["projects"])
def set_role_patterns(body: RolePatterns, caller: Admin, database: Db, now: Now) -> ProjectOut:
    """Set the role patterns of the key's project, for runs whose trainer sets no roles.

    Open runs apply them when they report a new metric.
    """
    project = project_settings.change_role_patterns(database, caller.author(now), body)
    return ProjectOut.model_validate(project)
