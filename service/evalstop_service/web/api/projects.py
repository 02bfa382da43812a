"""Projects: made with a key to the installation; each sees and changes its own defaults."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter
from pydantic import Field

from evalstop_service.decisions import pause
from evalstop_service.projects import administration, installation, policies
from evalstop_service.rules import random_assignment
from evalstop_service.store import projects
from evalstop_service.store.database import Database
from evalstop_service.store.ids import new_id
from evalstop_service.store.projects import Project
from evalstop_service.web.api.reading.json_body import JsonRoute
from evalstop_service.web.api.schemas import Answer, Body, Line, Mode, Name, ProjectOut, Whole, from_texts
from evalstop_service.web.context import Admin, Db, Installation, Now, Operate, Read

router = APIRouter(tags=["projects"], route_class=JsonRoute)

Retention = Annotated[int, Field(ge=1, le=36_500)]
Grace = Annotated[float, Field(ge=0, le=30 * 86400, allow_inf_nan=False)]
Wait = Annotated[float, Field(ge=1, le=30 * 86400, allow_inf_nan=False)]
PerHour = Annotated[Whole, Field(ge=1, le=1_000_000)]
Share = Annotated[float, Field(gt=0, le=1)]
ShareOrNone = Annotated[float, Field(ge=0, le=1)]
Price = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
Currency = Annotated[str, Field(pattern="^[A-Z]{3}$", examples=["USD"])]

NULLABLE = ("retention_days", "stops_per_hour", "stops_share", "price_per_gpu_hour")
"""Settings of which null is a value of its own."""


class ProjectIn(Body):
    """A new project. Its stops are only recorded until `default_mode` is `enforce`."""

    name: Name = Field(examples=["alignment"])
    default_policy: Line = policies.DEFAULT_POLICY
    default_mode: Mode = "shadow"
    grace_seconds: Grace = Field(0.0, description="how long a person may veto a stop before it is sent")
    retention_days: Retention | None = Field(
        None, description="how long a run keeps its details after its end; null: for ever"
    )
    stops_per_hour: PerHour | None = Field(30, description="as many stops there may be in an hour; null: any number")
    stops_share: Share | None = Field(
        0.5, description="of its runs at most this share may be stopped in an hour, but always one; null: all"
    )
    confirm_seconds: Wait = Field(900.0, description="how long a stop may wait for its confirmation")
    stale_seconds: Wait = Field(300.0, description="a run is not stale before it was silent for so long")
    held_out_share: ShareOrNone = Field(
        random_assignment.HELD_OUT_SHARE, description="of its stops: let run, to learn whether they are right"
    )
    price_per_gpu_hour: Price | None = Field(None, description="null: not said")
    currency: Currency = "USD"


class ProjectChange(Body):
    """New settings; what is left out stays, and so does null, but for `retention_days`, the bounds and the price."""

    default_policy: Line | None = None
    default_mode: Mode | None = None
    grace_seconds: Grace | None = None
    retention_days: Retention | None = Field(None, description="null: its runs are kept for ever")
    stops_per_hour: PerHour | None = Field(None, description="null: without bound")
    stops_share: Share | None = Field(None, description="null: without bound")
    confirm_seconds: Wait | None = None
    stale_seconds: Wait | None = None
    held_out_share: ShareOrNone | None = None
    price_per_gpu_hour: Price | None = Field(None, description="null: not said")
    currency: Currency | None = None


SETTABLE = frozenset(ProjectChange.model_fields)
"""The names of the settings that can be changed."""


class ProjectPauseIn(Body):
    """Who stops all stopping, and why."""

    actor: Name | None = Field(None, description="by default the name of the key", examples=["dana"])
    reason: Line = Field("", examples=["the eval set was replaced; its scores are not comparable"])


class ProjectResumeIn(Body):
    """Who lets stops go on."""

    actor: Name | None = Field(None, description="by default the name of the key", examples=["dana"])


class ProjectList(Answer):
    """All projects by name."""

    items: list[ProjectOut]


@router.post("/projects", status_code=201)
def add_project(body: ProjectIn, key: Installation, database: Db, now: Now) -> ProjectOut:
    """Make a project."""
    project = Project(id=new_id(), created_at=now, seed=installation.new_seed(), **body.model_dump())
    return ProjectOut.model_validate(administration.add_project(database, project, f"key {key.name}", now))


@router.get("/projects")
def list_projects(_key: Installation, database: Db) -> ProjectList:
    """All projects of the installation."""
    with database.reading() as tx:
        return ProjectList.model_validate({"items": projects.listing(tx)})


@router.get("/project")
def get_project(caller: Read, database: Db) -> ProjectOut:
    """The project of the key."""
    with database.reading() as tx:
        return ProjectOut.model_validate(projects.get(tx, caller.project_id))


@router.patch("/project")
def change_project(body: ProjectChange, caller: Admin, database: Db, now: Now) -> ProjectOut:
    """Change the key's project. Runs that are open keep policy and mode; all else holds for them from now on."""
    return ProjectOut.model_validate(_change(database, caller.project_id, caller.actor, body, now))


def change(database: Database, project_id: UUID, actor: str, said: Mapping[str, Any], now: datetime) -> Project:
    """Change settings that are given as texts, by the same rules; raises Invalid."""
    return _change(database, project_id, actor, from_texts(ProjectChange, said), now)


def _change(database: Database, project_id: UUID, actor: str, body: ProjectChange, now: datetime) -> Project:
    changes = body.model_dump(exclude_none=True)
    changes |= {name: getattr(body, name) for name in NULLABLE if name in body.model_fields_set}
    return administration.change_project(database, project_id, actor, changes, now)


@router.post("/project/pause")
def pause_project(body: ProjectPauseIn, caller: Operate, database: Db, now: Now) -> ProjectOut:
    """Stop nothing more in the key's project until it is resumed. Pausing twice is harmless.

    Once this is answered no stop that was pending will be sent; what was sent is not called back.
    """
    said_by = body.actor or caller.actor
    project = pause.pause(database, caller.project_id, said_by, body.reason, now, proved=caller.actor)
    return ProjectOut.model_validate(project)


@router.post("/project/resume")
def resume_project(body: ProjectResumeIn, caller: Operate, database: Db, now: Now) -> ProjectOut:
    """Let stops go on in the key's project; those on hold for the pause alone are taken up within a minute."""
    said_by = body.actor or caller.actor
    project = pause.resume(database, caller.project_id, said_by, now, proved=caller.actor)
    return ProjectOut.model_validate(project)
