"""Projects: made with a key to the installation; each sees and changes its own defaults."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter
from pydantic import Field

from evalstop_service import opening
from evalstop_service.api.bodies import JsonRoute
from evalstop_service.api.context import Admin, Db, Installation, Now, Read
from evalstop_service.api.schemas import Answer, Body, Line, Mode, Name, ProjectOut
from evalstop_service.errors import Conflict
from evalstop_service.store import projects
from evalstop_service.store.ids import new_id
from evalstop_service.store.projects import Project

router = APIRouter(tags=["projects"], route_class=JsonRoute)

Retention = Annotated[int, Field(ge=1, le=36_500)]
Grace = Annotated[float, Field(ge=0, le=30 * 86400, allow_inf_nan=False)]


class ProjectIn(Body):
    """A new project. Its stops are only recorded until `default_mode` is `enforce`."""

    name: Name = Field(examples=["alignment"])
    default_policy: Line = opening.DEFAULT_POLICY
    default_mode: Mode = "shadow"
    grace_seconds: Grace = Field(0.0, description="how long a person may veto a stop before it is sent")
    retention_days: Retention | None = Field(
        None, description="how long a run keeps its details after its end; null: for ever"
    )


class ProjectChange(Body):
    """New defaults; what is left out stays, and so does what is null, but for `retention_days`."""

    default_policy: Line | None = None
    default_mode: Mode | None = None
    grace_seconds: Grace | None = None
    retention_days: Retention | None = Field(None, description="null: its runs are kept for ever")


class ProjectList(Answer):
    """All projects by name."""

    items: list[ProjectOut]


@router.post("/projects", status_code=201)
def add_project(body: ProjectIn, _key: Installation, database: Db, now: Now) -> ProjectOut:
    """Make a project."""
    project = Project(id=new_id(), created_at=now, **body.model_dump())
    with database.transaction() as tx:
        if not projects.add(tx, project):
            raise Conflict(f"there is a project called {body.name!r} already")
        opening.resolve(tx, project, project.default_policy, now)
    return ProjectOut.model_validate(project)


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
    """Change the defaults of the key's project; runs that are open keep theirs."""
    changes = body.model_dump(exclude_none=True)
    if "retention_days" in body.model_fields_set:
        changes["retention_days"] = body.retention_days
    with database.transaction() as tx:
        project = replace(projects.lock(tx, caller.project_id), **changes)
        opening.resolve(tx, project, project.default_policy, now)
        projects.change(tx, project)
    return ProjectOut.model_validate(project)
