"""The page of settings: what a project does by itself, its keys, who may do what, and what was changed by whom."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import urlencode
from uuid import UUID

from fastapi import APIRouter, Form, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import RedirectResponse

from evalstop_service.decisions import pause as pausing
from evalstop_service.errors import Invalid
from evalstop_service.projects import api_keys, project_settings
from evalstop_service.projects.project_settings import (
    ProjectChange,
    RolePatterns,
    change_project_settings,
    parse_form,
)
from evalstop_service.security.scopes import EVERY
from evalstop_service.store import audit, keys
from evalstop_service.store.keys import SCOPES
from evalstop_service.store.projects import Project
from evalstop_service.web.dashboard import forms
from evalstop_service.web.dashboard.responses import PageRoute, page
from evalstop_service.web.dashboard.visitor import Administering, Operating, SignedIn, Site, SiteOf, Visitor

router = APIRouter(prefix="/settings", route_class=PageRoute)

PAGE = 50

_HOME = "/settings"


@dataclass(frozen=True)
class Setting:
    """How a setting of a project is shown. `empty`: what it means to leave it out, where that means something."""

    name: str
    label: str
    hint: str
    unit: str = ""
    empty: str | None = None
    choices: tuple[str, ...] = ()


GROUPS: tuple[tuple[str, tuple[Setting, ...]], ...] = (
    (
        "New runs",
        (
            Setting("default_policy", "Policy", "a name, or name@version; runs that are open keep theirs"),
            Setting(
                "default_mode",
                "Mode",
                "in shadow a stop is recorded and nobody is told",
                "",
                None,
                ("shadow", "enforce"),
            ),
        ),
    ),
    (
        "Stopping",
        (
            Setting("grace_seconds", "Grace", "so long a person may veto a stop before it is sent", "seconds"),
            Setting("confirm_seconds", "Confirmation", "a stop that waits longer for it is escalated", "seconds"),
            Setting(
                "held_out_share", "Held out", "of the stops, let run to learn whether they are right; 0 to 1", "share"
            ),
        ),
    ),
    (
        "Guards",
        (
            Setting("stops_per_hour", "Stops an hour", "at most so many", "", "any number"),
            Setting(
                "stops_share",
                "Share of the runs",
                "at most so many of them within an hour, but always one",
                "0 to 1",
                "all",
            ),
            Setting("stale_seconds", "Silence", "a run is not stale before it was silent for so long", "seconds"),
        ),
    ),
    (
        "Costs and keeping",
        (
            Setting("price_per_gpu_hour", "Price of a GPU-hour", "what savings are told in", "", "not said"),
            Setting("currency", "Currency", "three letters, as in USD"),
            Setting("retention_days", "Kept for", "after its end a run keeps its details so long", "days", "for ever"),
        ),
    ),
)


SETTINGS = [setting for _, settings in GROUPS for setting in settings]


@router.get("")
def show_settings(site: SiteOf, visitor: SignedIn) -> Response:
    """The project with all that may be set of it."""
    return _show(site, visitor)


@router.post("")
async def read_settings(request: Request, site: SiteOf, visitor: Administering) -> Response:
    """Change settings."""
    form = await request.form()
    return await run_in_threadpool(_change, site, visitor, {name: str(value) for name, value in form.items()})


def _change(site: Site, visitor: Visitor, written: dict[str, str]) -> Response:
    said: dict[str, str | None] = {}
    for setting in SETTINGS:
        if setting.name in written:
            text = written[setting.name].strip()
            said[setting.name] = None if not text and setting.empty is not None else text
    try:
        change = parse_form(ProjectChange, said)
        change_project_settings(site.database, visitor.project.id, visitor.actor, change, site.clock())
    except Invalid as error:
        return _show(site, visitor, problem=str(error), written=written, status=422)
    return RedirectResponse(_HOME, 303)


@router.post("/role-patterns")
def change_role_patterns(site: SiteOf, visitor: Administering, patterns: Annotated[str, Form()] = "") -> Response:
    """Say by pattern which metrics play which role, a line each."""
    try:
        lines = [_pattern(line) for line in patterns.splitlines() if line.strip()]
        change = parse_form(RolePatterns, {"role_patterns": lines})
        project_settings.change_role_patterns(site.database, visitor.project.id, visitor.actor, change, site.clock())
    except Invalid as error:
        return _show(site, visitor, problem=str(error), written={"patterns": patterns}, status=422)
    return RedirectResponse(f"{_HOME}#roles", 303)


@router.post("/pause")
def pause(site: SiteOf, visitor: Operating, reason: Annotated[str, Form(max_length=2000)] = "") -> Response:
    """Stop nothing more until somebody resumes."""
    pausing.pause_project(site.database, visitor.project.id, visitor.actor, forms.plain(reason), site.clock())
    return RedirectResponse(_HOME, 303)


@router.post("/resume")
def resume(site: SiteOf, visitor: Operating) -> Response:
    """Let stops go on."""
    pausing.resume_project(site.database, visitor.project.id, visitor.actor, site.clock())
    return RedirectResponse(_HOME, 303)


@router.post("/keys")
def make_key(
    site: SiteOf,
    visitor: Administering,
    name: Annotated[str, Form()] = "",
    scopes: Annotated[list[str] | None, Form()] = None,
) -> Response:
    """Make a key, and show it, once."""
    name = forms.plain(name)
    wanted = [scope for scope in SCOPES if scope in (scopes or ())]
    if not 1 <= len(name) <= 256 or not wanted:
        problem = "A key has a name of at most 256 characters, and at least one scope."
        return _show(site, visitor, problem=problem, status=422)
    key, secret = api_keys.create_key(site.database, visitor.project.id, visitor.actor, name, wanted, site.clock())
    return _show(site, visitor, secret=(key.name, secret))


@router.post("/keys/{key_id}/revoke")
def revoke_key(key_id: UUID, site: SiteOf, visitor: Administering) -> Response:
    """Take a key out of use for good."""
    api_keys.revoke_key(site.database, site.doors.key_cache, visitor.project.id, visitor.actor, key_id, site.clock())
    return RedirectResponse(f"{_HOME}#keys", 303)


@router.get("/audit")
def show_audit(
    site: SiteOf, visitor: Administering, actor: str = "", action: str = "", cursor: UUID | None = None
) -> Response:
    """What was changed, newest first."""
    actor, action = forms.plain(actor), forms.plain(action)
    with site.database.reading() as tx:
        found = audit.list_entries(
            tx, visitor.project.id, actor=actor or None, action=action or None, before=cursor, limit=PAGE + 1
        )
    query = {"actor": actor, "action": action}
    return page(
        "audit.html",
        visitor=visitor,
        here="settings",
        entries=found[:PAGE],
        actor=actor,
        action=action,
        kinds=("session", "project", "key", "policy", "rollout_stage", "run", "decision", "endpoint", "delivery"),
        next_page=_audit_link(query | {"cursor": str(found[PAGE - 1].id)}) if len(found) > PAGE else None,
        first_page=_audit_link(query) if cursor else None,
    )


def _show(site: Site, visitor: Visitor, *, status: int = 200, **told: Any) -> Response:
    with site.database.reading() as tx:
        found = keys.list_keys(tx, visitor.project.id) if visitor.may("admin") else []
    values: dict[str, Any] = {"problem": None, "secret": None, "written": {}} | told
    project = visitor.project
    return page(
        "settings.html",
        status,
        visitor=visitor,
        here="settings",
        project=project,
        groups=[
            (title, [(setting, _text(project, setting, values["written"])) for setting in settings])
            for title, settings in GROUPS
        ],
        patterns=values["written"].get("patterns") or "\n".join(map(_line, project.role_patterns)),
        keys=sorted(found, key=lambda key: (key.revoked_at is not None, key.created_at)),
        scopes=SCOPES,
        members=[grant for grant in site.openid.grants.entries if grant.project in (project.name, EVERY)]
        if site.openid
        else [],
        **values,
    )


def _text(project: Project, setting: Setting, written: dict[str, str]) -> str:
    value = getattr(project, setting.name)
    kept = "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
    return written.get(setting.name, kept)


def _line(pattern: dict[str, str]) -> str:
    return " ".join(pattern[name] for name in ("pattern", "role", "direction") if name in pattern)


def _pattern(line: str) -> dict[str, str]:
    words = line.split()
    if not 2 <= len(words) <= 3:
        raise Invalid(f"a line has a pattern, a role, and maybe a direction: {line.strip()[:80]!r}")
    return dict(zip(("pattern", "role", "direction"), words, strict=False))


def _audit_link(query: dict[str, str]) -> str:
    return f"{_HOME}/audit?{urlencode({name: value for name, value in query.items() if value})}"
