"""Routes of projects: create and list with an installation key, settings, pause."""

from __future__ import annotations

from typing import Annotated
from uuid import UUID

from fastapi import Path
from fastapi.responses import JSONResponse
from pydantic import Field

from evalstop_service.decisions import pause, second_person
from evalstop_service.domain.fields import Body, Line
from evalstop_service.projects import api_keys, project_settings
from evalstop_service.projects.project_settings import NewProject, ProjectChange, QuotasIn
from evalstop_service.store import projects
from evalstop_service.store.audit import Author
from evalstop_service.web.api.json_body import create_router
from evalstop_service.web.api.keys import KeyIn, NewKeyOut
from evalstop_service.web.api.proposals import WAITS, answer_proposal
from evalstop_service.web.api.schemas import Items, ProjectOut
from evalstop_service.web.context import Admin, DatabaseNow, Db, Installation, Now, Operate, Read

router = create_router("projects")

ProjectId = Annotated[UUID, Path(description="`id` of the project, as listed")]


class ProjectPauseIn(Body):
    """Why stops pause, and until when."""

    reason: Line = Field(
        "",
        description="why; shown on every page",
        examples=["the eval set was replaced; its scores are not comparable"],
    )
    until: Annotated[str, Field(max_length=60)] | None = Field(
        None,
        description="when it resumes by itself: a time, or a duration from now; null: when it is resumed",
        examples=["4h", "2030-01-31T09:00:00Z"],
    )


class ProjectPauseOut(ProjectOut):
    """The paused project."""

    already_paused: bool = Field(description="it was paused before; of two pauses the one that ends later holds")


@router.post("/projects", status_code=201)
def create_project(body: NewProject, key: Installation, database: Db, now: Now) -> ProjectOut:
    """Create a project."""
    return ProjectOut.model_validate(project_settings.create_project(database, body, f"key {key.name}", now))


@router.get("/projects")
def list_projects(_key: Installation, database: Db) -> Items[ProjectOut]:
    """All projects of the installation, by name."""
    with database.reading() as tx:
        return Items[ProjectOut].model_validate({"items": projects.list_projects(tx)})


@router.post("/projects/{project_id}/keys", status_code=201)
def create_project_key(project_id: ProjectId, body: KeyIn, key: Installation, database: Db, now: Now) -> NewKeyOut:
    """Create a key of a project, such as the first one of a new project."""
    actor = f"key {key.name}"
    made, secret = api_keys.create_key(database, project_id, actor, body.name, body.scopes, now, body.limits)
    return NewKeyOut.model_validate(vars(made) | {"key": secret})


@router.put("/projects/{project_id}/quotas")
def set_quotas(project_id: ProjectId, body: QuotasIn, key: Installation, database: Db, now: Now) -> ProjectOut:
    """Set the quotas of a project; omitted ones get their defaults. A project's own keys cannot change them."""
    author = Author(project_id, f"key {key.name}", now)
    return ProjectOut.model_validate(project_settings.set_quotas(database, author, body))


@router.get("/project")
def get_project(caller: Read, database: Db) -> ProjectOut:
    """The project of the key."""
    with database.reading() as tx:
        return ProjectOut.model_validate(projects.get_project(tx, caller.project_id))


@router.patch("/project", response_model=ProjectOut, responses=WAITS)
def change_project(body: ProjectChange, caller: Admin, database: Db, now: Now) -> ProjectOut | JSONResponse:
    """Change settings of the key's project. Open runs keep policy and mode; other settings apply to them
    immediately."""
    waiting = second_person.change_project(database, caller.author(now), body)
    return get_project(caller, database) if waiting is None else answer_proposal(waiting, now)


@router.post("/project/pause")
def pause_project(body: ProjectPauseIn, caller: Operate, database: Db, now: DatabaseNow) -> ProjectPauseOut:
    """Pause all stops in the key's project. Of two pauses the one that ends later holds.

    Pending stops are no longer sent; stops that were already sent are not recalled.
    """
    until = pause.read_end(body.until, now)
    project = pause.pause_project(database, caller.project_id, caller.actor, body.reason, now, until)
    return ProjectPauseOut.model_validate(vars(project) | {"already_paused": project.paused_at != now})


@router.post("/project/resume")
def resume_project(caller: Operate, database: Db, now: Now) -> ProjectOut:
    """Resume stops in the key's project; stops that only the pause holds continue within a minute."""
    project = pause.resume_project(database, caller.project_id, caller.actor, now)
    return ProjectOut.model_validate(project)
