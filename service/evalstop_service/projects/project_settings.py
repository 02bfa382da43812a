"""Settings of a project: their limits, and the functions that create a project and change its settings.

The API, the dashboard and the command line all use these. Every change is in the audit log.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args

import msgspec
from pydantic import Field, ValidationError, create_model

from evalstop_service.domain import decision_lifecycle
from evalstop_service.domain.fields import Body, Integral, Name
from evalstop_service.domain.project_settings import Quotas, format_value, list_settings, list_widened
from evalstop_service.errors import Conflict, Invalid, require
from evalstop_service.projects import policies
from evalstop_service.store import audit, projects
from evalstop_service.store.audit import Author
from evalstop_service.store.database import Database, Transaction
from evalstop_service.store.ids import new_id
from evalstop_service.store.projects import Project

_FIELDS: dict[str, Any] = {
    declared.name: (declared.annotation | None, Field(None, description=declared.description))
    for declared in list_settings()
}
_Changes: Any = create_model("_Changes", __base__=Body, **_FIELDS)


class ProjectChange(_Changes):
    """New settings. An omitted field keeps its value, and so does null in fields that cannot be null.

    Durations are seconds, or a text such as `15m` or `4h`.
    """

    if TYPE_CHECKING:  # its fields are those of ProjectSettings

        def __init__(self, **settings: Any) -> None: ...


class NewProject(ProjectChange):
    """A new project. An omitted field gets its default, and so does null in fields that cannot be null.

    Its stops are only recorded unless `max_mode` is `enforce`; the default of `max_mode` is `default_mode`.
    """

    name: Name = Field(description="unique in the installation", examples=["alignment"])

    if TYPE_CHECKING:

        def __init__(self, *, name: str, **settings: Any) -> None: ...


_LIMITS: dict[str, Any] = {
    quota.name: (
        Annotated[int, Field(ge=limit.ge, le=limit.le, description=limit.description), Integral],
        quota.default,
    )
    for quota in msgspec.structs.fields(Quotas)
    for limit in get_args(quota.type)[1:]
}
_Limits: Any = create_model("_Limits", __base__=Body, **_LIMITS)


class QuotasIn(_Limits):
    """Limits on what the project may have."""


NULLABLE = tuple(declared.name for declared in list_settings() if declared.is_nullable)
"""Settings whose value may be null."""

_Body = TypeVar("_Body", bound=Body)


def parse_form(model: type[_Body], values: Mapping[str, Any]) -> _Body:
    """Validate text values, as from an HTML form; raises Invalid, which names the field."""
    try:
        return model.model_validate(dict(values), strict=False)
    except ValidationError as error:
        first = error.errors()[0]
        field = " ".join(str(part) for part in first["loc"])
        fault = first["msg"].removeprefix("Value error, ")
        raise Invalid(f"{field}: {fault}", str(first["loc"][0]) if first["loc"] else None, fault) from None


def create_project(database: Database, settings: NewProject, actor: str, now: datetime) -> Project:
    """Create a project; raises Conflict if its name is taken, Invalid if its default policy does not exist."""
    with database.transaction() as tx:
        return insert_project(tx, settings, actor, now)


def require_project(tx: Transaction, settings: NewProject, actor: str, now: datetime) -> Project:
    """The project of this name, created if there is none."""
    return projects.find_project_by_name(tx, settings.name) or insert_project(tx, settings, actor, now)


def insert_project(tx: Transaction, settings: NewProject, actor: str, now: datetime) -> Project:
    """Like `create_project`, within a transaction."""
    default = Project(new_id(), settings.name, created_at=now, seed=secrets.token_hex(16))
    values = _list_values(settings)
    if "max_mode" not in values and "default_mode" in values:
        values["max_mode"] = values["default_mode"]
    project = replace(default, **values)
    _check_modes(project)
    if not projects.add_project(tx, project):
        raise Conflict(f"a project called {project.name!r} already exists")
    policies.add_shipped(tx, project, now)
    if project.panel is not None:
        policies.change_panel(tx, Author(project.id, actor, now), project)
    policies.find_referred_policy(tx, project.id, project.default_policy)
    audit.record_action(tx, project.id, actor, "project.created", f"project {project.name}", None, now)
    return project


def _list_values(change: ProjectChange) -> dict[str, Any]:
    values = {declared.name: getattr(change, declared.name) for declared in list_settings()}
    values = {name: value for name, value in values.items() if value is not None}
    return values | {name: getattr(change, name) for name in NULLABLE if name in change.model_fields_set}


def apply_change(tx: Transaction, author: Author, change: ProjectChange) -> Project:
    """Change settings of a project; raises Invalid if its default policy does not exist, Conflict if its modes
    contradict each other, so that nothing could be stopped."""
    values = _list_values(change)
    before = projects.lock_project(tx, author.project_id)
    project = replace(before, **values)
    _check_modes(project)
    policies.find_referred_policy(tx, project.id, project.default_policy)
    changed = {name: value for name, value in values.items() if getattr(before, name) != value}
    if changed:
        projects.update_project(tx, project)
        if "panel" in changed:
            policies.change_panel(tx, author, project)
        author.record(tx, "project.changed", f"project {project.name}", msgspec.to_builtins(changed))
    return project


def set_quotas(database: Database, author: Author, quotas: QuotasIn) -> Project:
    """Set the quotas of a project; raises NotFound. For operators of the installation, not for project members."""
    with database.transaction() as tx:
        require(projects.find_project(tx, author.project_id), f"project {author.project_id}")
        before = projects.lock_project(tx, author.project_id)
        project = replace(before, quotas=Quotas(**quotas.model_dump()))
        if project != before:
            projects.update_project(tx, project)
            author.record(tx, "project.quotas_set", f"project {project.name}", quotas.model_dump())
    return project


def describe_widening(project: Project, change: ProjectChange) -> str:
    """The changed settings that permit more jobs to be ended, or fewer people to end them; empty: none."""
    after = replace(project, **_list_values(change))
    widened = list_widened(project, after)
    if after.default_policy != project.default_policy:
        widened.append("default_policy")
    if project.allowed_policies is not None:
        allowed = after.allowed_policies
        if allowed is None or not all(policies.is_allowed(project, reference) for reference in allowed):
            widened.append("allowed_policies")
    return ", ".join(f"{name} = {format_value(name, getattr(after, name)) or 'none'}" for name in widened)


def _check_modes(project: Project) -> None:
    if project.default_mode is decision_lifecycle.Mode.ENFORCE and project.max_mode is not project.default_mode:
        raise Conflict("default_mode is enforce but max_mode is shadow, which allows no stops: change both")
