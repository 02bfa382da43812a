"""The settings of a project: defaults, guards, metric roles, keys, members, and the audit log."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Depends, Form, Request, Response
from fastapi.responses import RedirectResponse

from evalstop_service.decisions import pause as pausing
from evalstop_service.decisions import second_person
from evalstop_service.errors import Conflict, Invalid
from evalstop_service.projects import api_keys, project_settings
from evalstop_service.projects import sessions as people
from evalstop_service.projects.project_settings import ProjectChange, RolePatterns, parse_form
from evalstop_service.security.scopes import EVERY
from evalstop_service.store import audit, keys, quota_use
from evalstop_service.store.database import Transaction
from evalstop_service.store.keys import SCOPES, Key
from evalstop_service.store.projects import Project
from evalstop_service.web.dashboard import forms
from evalstop_service.web.dashboard.notices import add_notice
from evalstop_service.web.dashboard.responses import PageRoute, make_link, render_page
from evalstop_service.web.dashboard.visitor import Admin, FreshAdmin, Operator, SignedIn, Site, SiteOf, Visitor

router = APIRouter(prefix="/settings", route_class=PageRoute)

PAGE = 50

_PATH = "/settings"

KINDS = (
    *("session", "project", "key", "policy", "rollout_stage", "proposal"),
    *("run", "decision", "endpoint", "delivery", "audit"),
)
"""The filters of the audit log: prefixes of actions."""


@dataclass(frozen=True)
class Setting:
    """A field of the form. `empty`: what an empty value means; None if a value is required."""

    name: str
    label: str
    hint: str
    unit: str = ""
    empty: str | None = None
    choices: tuple[str, ...] = ()


MODES = ("shadow", "enforce")

GROUPS: tuple[tuple[str, tuple[Setting, ...]], ...] = (
    (
        "New runs",
        (
            Setting("default_policy", "Policy", "NAME or NAME@VERSION; open runs keep theirs"),
            Setting("default_mode", "Mode", "shadow: stops are only recorded", choices=MODES),
            Setting("max_mode", "Highest mode", "shadow: nothing is stopped, whatever trainers request", choices=MODES),
            Setting(
                "allowed_policies",
                "Allowed policies",
                "policies that trainers may request in addition to the project's; separated by commas; none: no others",
                empty="any",
            ),
        ),
    ),
    (
        "Stopping",
        (
            Setting(
                "veto_window_seconds", "Veto window before a stop is sent", "time in which it can be vetoed", "seconds"
            ),
            Setting("confirm_seconds", "Confirmation", "unconfirmed stops are escalated after this time", "seconds"),
            Setting(
                "second_person",
                "Second person",
                "yes: another person must confirm Stop now, releases, and changes that allow more stops",
                choices=("no", "yes"),
            ),
            Setting(
                "held_out_share", "Held out", "share of stops that are not carried out, to measure precision", "0 to 1"
            ),
        ),
    ),
    (
        "Guards",
        (
            Setting("stops_per_hour", "Stops per hour", "maximum number", "", "unlimited"),
            Setting(
                "stops_share",
                "Share of the runs",
                "maximum share of runs stopped within an hour; one is always allowed",
                "0 to 1",
                "unlimited",
            ),
            Setting("stale_seconds", "Stale after", "shortest silence after which a run is stale", "seconds"),
        ),
    ),
    (
        "Cases that count towards a rollout stage",
        (
            Setting("case_seconds", "Duration", "shorter attempts do not count", "seconds"),
            Setting("case_evals", "Evals", "attempts with fewer finite evals do not count"),
            Setting("case_gpu_hours", "GPU-hours", "attempts that used fewer, if known, do not count"),
            Setting("cases_per_key_and_day", "Cases per key and day", "maximum number that counts"),
        ),
    ),
    (
        "Costs and retention",
        (
            Setting("price_per_gpu_hour", "Price of a GPU-hour", "used to show savings", "", "not set"),
            Setting("currency", "Currency", "three letters, such as USD"),
            Setting(
                "retention_days",
                "Retention",
                "how long observations are kept after the end of a run",
                "days",
                "forever",
            ),
        ),
    ),
)


NONE = "none"
"""What the field of an empty list says: an empty field means any."""

SETTINGS = [setting for _, settings in GROUPS for setting in settings]


@router.get("")
def show_settings(site: SiteOf, visitor: SignedIn) -> Response:
    """The settings page."""
    return _render_settings(site, visitor)


async def _read_form(request: Request) -> dict[str, str]:
    return {name: str(value) for name, value in (await request.form()).items()}


@router.post("")
def change_settings(
    request: Request, site: SiteOf, visitor: FreshAdmin, written: Annotated[dict[str, str], Depends(_read_form)]
) -> Response:
    """Change settings."""
    changes: dict[str, str | list[str] | None] = {}
    for setting in SETTINGS:
        if setting.name in written:
            text = written[setting.name].strip()
            value = _parse_policies(text) if setting.name == "allowed_policies" else text
            changes[setting.name] = None if not text and setting.empty is not None else value
    try:
        change = parse_form(ProjectChange, changes)
        proposal = second_person.change_project(site.database, visitor.author(site.clock()), change)
    except Conflict as error:
        return _render_settings(site, visitor, problem=str(error), written=written, status=422)
    except Invalid as error:
        label = next((setting.label for setting in SETTINGS if setting.name == error.field), None)
        problem = str(error) if label is None else f"{label}: {error.fault}"
        return _render_settings(site, visitor, problem=problem, wrong=error, written=written, status=422)
    response = RedirectResponse(_PATH, 303)
    return response if proposal is None else add_notice(response, request, "proposed")


@router.post("/role-patterns")
def change_role_patterns(site: SiteOf, visitor: FreshAdmin, patterns: Annotated[str, Form()] = "") -> Response:
    """Set the role patterns, one per line."""
    try:
        lines = [_parse_pattern(line) for line in patterns.splitlines() if line.strip()]
        change = parse_form(RolePatterns, {"role_patterns": lines})
        project_settings.change_role_patterns(site.database, visitor.author(site.clock()), change)
    except Invalid as error:
        return _render_settings(site, visitor, problem=str(error), written={"patterns": patterns}, status=422)
    return RedirectResponse(f"{_PATH}#roles", 303)


@router.post("/pause")
def pause_project(
    request: Request, site: SiteOf, visitor: Operator, reason: Annotated[str, Form(max_length=2000)] = ""
) -> Response:
    """Pause all stops in the project."""
    pausing.pause_project(site.database, visitor.project.id, visitor.actor, forms.clean_text(reason), site.clock())
    return add_notice(RedirectResponse(_PATH, 303), request, "paused")


@router.post("/resume")
def resume_project(request: Request, site: SiteOf, visitor: Operator) -> Response:
    """Resume stopping."""
    pausing.resume_project(site.database, visitor.project.id, visitor.actor, site.clock())
    return add_notice(RedirectResponse(_PATH, 303), request, "resumed")


@router.post("/keys")
def create_key(
    site: SiteOf,
    visitor: FreshAdmin,
    name: Annotated[str, Form()] = "",
    scopes: Annotated[list[str] | None, Form()] = None,
) -> Response:
    """Create a key and show it once."""
    name = forms.clean_text(name)
    chosen_scopes = [scope for scope in SCOPES if scope in (scopes or ())]
    if not 1 <= len(name) <= 256 or not chosen_scopes:
        problem = "Enter a name of at most 256 characters and choose at least one scope."
        return _render_settings(site, visitor, problem=problem, status=422)
    key, secret = api_keys.create_key(
        site.database, visitor.project.id, visitor.actor, name, chosen_scopes, site.clock()
    )
    return _render_settings(site, visitor, secret=(key.name, secret))


@router.post("/keys/{key_id}/revoke")
def revoke_key(key_id: UUID, site: SiteOf, visitor: Admin) -> Response:
    """Revoke a key."""
    api_keys.revoke_key(site.database, site.context.key_cache, visitor.author(site.clock()), key_id)
    return RedirectResponse(f"{_PATH}#keys", 303)


@router.post("/sessions/{session_id}/end")
def end_session(session_id: UUID, site: SiteOf, visitor: Admin) -> Response:
    """End a session."""
    people.end_session(site.database, visitor.author(site.clock()), session_id)
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
        kinds=KINDS,
        next_page=make_link(path, {**query, "cursor": entries[PAGE - 1].id}) if len(entries) > PAGE else None,
        first_page=make_link(path, query) if cursor else None,
    )


def _render_settings(site: Site, visitor: Visitor, *, status: int = 200, **overrides: Any) -> Response:
    with site.database.reading() as tx:
        project_keys = _list_keys(tx, visitor.project.id, site.clock()) if visitor.may("admin") else []
        used = quota_use.load_use(tx, site.clock(), visitor.project.id)[visitor.project.id]
        open_sessions = people.list_sessions(tx, visitor.project.id, site.clock()) if visitor.may("admin") else []
    values: dict[str, Any] = {"problem": None, "wrong": None, "secret": None, "written": {}} | overrides
    project = visitor.project
    return render_page(
        "settings.html",
        status,
        visitor=visitor,
        here="settings",
        project=project,
        groups=[
            (title, [(setting, _format_field(project, setting, values["written"])) for setting in settings])
            for title, settings in GROUPS
        ],
        quotas=used,
        patterns=values["written"].get("patterns") or "\n".join(map(_format_pattern, project.role_patterns)),
        keys=project_keys,
        sessions=open_sessions,
        members=[grant for grant in site.openid.grants.entries if grant.project in (project.name, EVERY)]
        if site.openid
        else [],
        **values,
    )


def _format_field(project: Project, setting: Setting, written: dict[str, str]) -> str:
    value = getattr(project, setting.name)
    if isinstance(value, list):
        value = ", ".join(value) or NONE
    if isinstance(value, bool):
        value = "yes" if value else "no"
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    stored = "" if value is None else str(value)
    return written.get(setting.name, stored)


def _parse_policies(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    return [] if names == [NONE] else names


def _format_pattern(pattern: dict[str, str]) -> str:
    return " ".join(pattern[name] for name in ("pattern", "role", "direction") if name in pattern)


def _parse_pattern(line: str) -> dict[str, str]:
    parts = line.split()
    if not 2 <= len(parts) <= 3:
        raise Invalid(f"a line is PATTERN ROLE [DIRECTION], not {line.strip()[:80]!r}")
    return dict(zip(("pattern", "role", "direction"), parts, strict=False))


def _list_keys(tx: Transaction, project_id: UUID, now: datetime) -> list[Key]:
    """The valid keys, then those of the newest that are revoked or expired."""
    valid_keys = keys.list_keys_in_use(tx, project_id, now)
    valid_ids = {key.id for key in valid_keys}
    newest = keys.list_keys(tx, project_id, limit=PAGE)
    return [*valid_keys, *(key for key in newest if key.id not in valid_ids)]
