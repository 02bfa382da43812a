"""The settings of a project: defaults, guards, metric roles, keys, members, and the audit log."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Depends, Form, Request, Response
from fastapi.responses import RedirectResponse

from evalstop_service.decisions import pause as pausing
from evalstop_service.decisions import second_person
from evalstop_service.domain.decision_lifecycle import Mode
from evalstop_service.domain.project_settings import Declared, Group, format_value, list_settings
from evalstop_service.errors import Conflict, Invalid
from evalstop_service.projects import api_keys
from evalstop_service.projects.project_settings import ProjectChange, parse_form
from evalstop_service.security.scopes import EVERY
from evalstop_service.store import audit, counts, keys
from evalstop_service.store.projects import Project
from evalstop_service.web.api.keys import KeyIn
from evalstop_service.web.pages import forms
from evalstop_service.web.pages.forms import QUEUE
from evalstop_service.web.pages.responses import PageRoute, make_link, render_page
from evalstop_service.web.pages.visitor import Admin, FreshAdmin, Operator, SignedIn, Site, SiteOf, Visitor

router = APIRouter(prefix="/settings", route_class=PageRoute)

PAGE = 50

_PATH = "/settings"

NONE = "none"
"""What the field of an empty list says: an empty field means any."""


@router.get("")
def show_settings(site: SiteOf, visitor: SignedIn) -> Response:
    """The settings page."""
    return _render_settings(site, visitor)


async def _read_form(request: Request) -> dict[str, str]:
    return {name: str(value) for name, value in (await request.form()).items()}


@router.post("")
def change_settings(
    site: SiteOf, visitor: FreshAdmin, written: Annotated[dict[str, str], Depends(_read_form)]
) -> Response:
    """Change settings."""
    changes: dict[str, str | list[str] | None] = {}
    for declared in list_settings():
        if declared.name in written:
            text = written[declared.name].strip()
            value = _parse_list(text) if declared.is_list else text
            changes[declared.name] = None if not text and declared.is_nullable else value
    try:
        change = parse_form(ProjectChange, changes)
        proposal = second_person.change_project(site.database, visitor.author(site.clock()), change)
    except Conflict as error:
        return _render_settings(site, visitor, problem=str(error), written=written, status=422)
    except Invalid as error:
        label = next((item.setting.label for item in list_settings() if item.name == error.field), None)
        problem = str(error) if label is None else f"{label}: {error.fault}"
        return _render_settings(site, visitor, problem=problem, wrong=error, written=written, status=422)
    return RedirectResponse(_PATH if proposal is None else QUEUE, 303)


@router.post("/pause")
def pause_project(
    site: SiteOf,
    visitor: Operator,
    reason: Annotated[str, Form(max_length=2000)] = "",
    until: Annotated[str, Form(max_length=60)] = "",
) -> Response:
    """Pause all stops in the project."""
    now = site.context.read_time()
    end, reason = pausing.read_end(until.strip(), now), forms.clean_text(reason)
    pausing.pause_project(site.database, visitor.project.id, visitor.actor, reason, now, until=end)
    return RedirectResponse(_PATH, 303)


@router.post("/resume")
def resume_project(site: SiteOf, visitor: Operator) -> Response:
    """Resume stopping."""
    pausing.resume_project(site.database, visitor.project.id, visitor.actor, site.clock())
    return RedirectResponse(_PATH, 303)


@router.post("/keys")
def create_key(
    site: SiteOf,
    visitor: FreshAdmin,
    name: Annotated[str, Form()] = "",
    scopes: Annotated[list[str] | None, Form()] = None,
) -> Response:
    """Create a key and show it once."""
    try:
        written = parse_form(KeyIn, {"name": forms.clean_text(name), "scopes": scopes or []})
    except Invalid as error:
        return _render_settings(site, visitor, problem=str(error), status=422)
    made = (site.database, visitor.project.id, visitor.actor, written.name, written.scopes, site.clock())
    key, secret = api_keys.create_key(*made)
    return _render_settings(site, visitor, secret=(key.name, secret))


@router.post("/keys/{key_id}/revoke")
def revoke_key(key_id: UUID, site: SiteOf, visitor: Admin) -> Response:
    """Revoke a key."""
    api_keys.revoke_key(site.database, site.context.key_cache, visitor.author(site.clock()), key_id)
    return RedirectResponse(f"{_PATH}#keys", 303)


@router.post("/sessions/{session_id}/end")
def end_session(session_id: UUID, site: SiteOf, visitor: Admin) -> Response:
    """End a session."""
    api_keys.end_session(site.database, visitor.author(site.clock()), session_id)
    return RedirectResponse(f"{_PATH}#sessions", 303)


@router.get("/audit")
def show_audit(site: SiteOf, visitor: Admin, actor: str = "", action: str = "", cursor: UUID | None = None) -> Response:
    """The audit log, newest first."""
    actor, action = forms.clean_text(actor), forms.clean_text(action)
    with site.database.reading() as tx:
        entries = audit.list_entries(
            tx, visitor.project.id, actor=actor or None, action=action or None, before=cursor, limit=PAGE + 1
        )
    path, query = f"{_PATH}/audit", {"actor": actor, "action": action}
    return render_page(
        "audit.html",
        visitor=visitor,
        here="settings",
        entries=entries[:PAGE],
        actor=actor,
        action=action,
        next_page=make_link(path, {**query, "cursor": entries[PAGE - 1].id}) if len(entries) > PAGE else None,
        first_page=make_link(path, query) if cursor else None,
    )


def _render_settings(site: Site, visitor: Visitor, *, status: int = 200, **overrides: Any) -> Response:
    with site.database.reading() as tx:
        project_keys = keys.list_keys_in_use(tx, visitor.project.id, site.clock()) if visitor.may("admin") else []
        used = counts.load_use(tx, site.clock(), visitor.project)
        open_sessions = api_keys.list_sessions(tx, visitor.project.id, site.clock()) if visitor.may("admin") else []
    values: dict[str, Any] = {"problem": None, "wrong": None, "secret": None, "written": {}} | overrides
    project = visitor.project
    return render_page(
        "settings.html",
        status,
        visitor=visitor,
        here="settings",
        project=project,
        groups=[(group, _describe_fields(group, project, values["written"])) for group in Group],
        quotas=used,
        keys=project_keys,
        sessions=open_sessions,
        members=[grant for grant in site.openid.grants.entries if grant.project in (project.name, EVERY)]
        if site.openid
        else [],
        **values,
    )


def _describe_fields(
    group: Group, project: Project, written: dict[str, str]
) -> Iterator[tuple[Declared, str, tuple[str, ...]]]:
    """The settings of a group, each with its value as text, and the values to choose from, if they are few."""
    for declared in list_settings():
        if declared.setting.group is group:
            value = getattr(project, declared.name)
            stored = "" if value is None else format_value(declared.name, value) or NONE
            choices: tuple[str, ...] = {bool: ("no", "yes"), Mode: tuple(Mode)}.get(declared.bare, ())
            yield declared, written.get(declared.name, stored), choices


def _parse_list(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    return [] if names == [NONE] else names
