"""Pausing a project: while it is paused, no stop is requested."""

from __future__ import annotations

import logging
from dataclasses import replace
from datetime import datetime, timedelta
from uuid import UUID

from evalstop_service.clock import in_utc, rfc3339
from evalstop_service.decisions import holds
from evalstop_service.domain.times import parse_duration
from evalstop_service.errors import Invalid
from evalstop_service.store import audit, projects
from evalstop_service.store.database import Database
from evalstop_service.store.projects import Project

log = logging.getLogger(__name__)


def pause_project(
    database: Database, project_id: UUID, actor: str, reason: str, now: datetime, until: datetime | None = None
) -> Project:
    """Pause a project; returns when all its pending stops are on hold.

    `until`: when it resumes by itself; None: when a person resumes it. Of two pauses the one that ends later holds.

    1. Set the pause under the lock that every decision takes: a stop is either stored before it, or sees the pause.
    2. Put the pending stops on hold, each in its own transaction, so that many runs are never locked at once. If that
       is interrupted, `deadlines` puts the others on hold.
    """
    with database.transaction() as tx:
        project = projects.lock_project(tx, project_id)
        if _lasts_longer(project, until):
            paused_at = project.paused_at or now
            project = replace(
                project, paused_at=paused_at, paused_by=actor, paused_reason=reason or None, paused_until=until
            )
            projects.update_project(tx, project)
            subject, details = f"project {project.name}", {"reason": reason}
            details |= {"until": rfc3339(until)} if until is not None else {}
            audit.record_action(tx, project.id, actor, "project.paused", subject, details, now)
    holds.withdraw_stops(database, now, project_id)
    log.warning("project %s is paused by %s", project.name, project.paused_by)
    return project


def _lasts_longer(project: Project, until: datetime | None) -> bool:
    """Whether a pause until then lasts longer than the present one, if there is any."""
    if project.paused_at is None:
        return True
    return project.paused_until is not None and (until is None or until > project.paused_until)


def resume_project(
    database: Database, project_id: UUID, actor: str, now: datetime, *, only_if_over: bool = False
) -> Project:
    """Allow stops in a project again; the guards of stops on hold are checked again within a minute.

    `only_if_over`: unless its pause has been made longer since.
    """
    with database.transaction() as tx:
        project = projects.lock_project(tx, project_id)
        is_over = project.paused_until is not None and project.paused_until <= now
        if project.paused_at is not None and (is_over or not only_if_over):
            project = replace(project, paused_at=None, paused_by=None, paused_reason=None, paused_until=None)
            projects.update_project(tx, project)
            audit.record_action(tx, project.id, actor, "project.resumed", f"project {project.name}", None, now)
            log.warning("project %s is resumed by %s", project.name, actor)
    return project


def read_end(text: str | None, now: datetime) -> datetime | None:
    """When a pause is to end: after a duration such as `4h`, or at a time; raises Invalid."""
    if not text:
        return None
    try:
        end = now + timedelta(seconds=parse_duration(text))
    except (ValueError, OverflowError):
        try:
            end = in_utc(datetime.fromisoformat(text))
        except ValueError:
            end = now
    if end <= now:
        raise Invalid("until: it must be a duration such as 4h, or a time to come such as 2030-01-31T09:00Z", "until")
    return end
