"""The pause of a project: from its answer on nothing is stopped that was not handed out before."""

from __future__ import annotations

import logging
from dataclasses import replace
from datetime import datetime
from uuid import UUID

from evalstop_service.decisions import guards, transitions
from evalstop_service.store import audit, projects
from evalstop_service.store.database import Database
from evalstop_service.store.projects import Project

log = logging.getLogger(__name__)


def pause_project(
    database: Database, project_id: UUID, actor: str, reason: str, now: datetime, proved: str | None = None
) -> Project:
    """Pause a project, and return when all its pending stops are on hold. Of two pauses the first one stands.

    `actor` says so; `proved` is who it is known to be, where that is another.
    """
    with database.transaction() as tx:
        # Whoever decides holds this lock: a stop is either on record by now, or will find the pause.
        project = projects.lock_project(tx, project_id)
        if project.paused_at is None:
            project = replace(project, paused_at=now, paused_by=actor, paused_reason=reason or None)
            projects.update_project(tx, project)
            subject, told = f"project {project.name}", {"reason": reason}
            audit.record_action(tx, project.id, actor, "project.paused", subject, told, now, proved)
    held = transitions.hold_pending_stops(database, project_id, guards.find_pause(project), now)
    log.warning("project %s is paused by %s; %d stops are on_hold", project.name, project.paused_by, held)
    return project


def resume_project(
    database: Database, project_id: UUID, actor: str, now: datetime, proved: str | None = None
) -> Project:
    """Let stops go on in a project; those that are on_hold are looked at again when their time comes."""
    with database.transaction() as tx:
        project = projects.lock_project(tx, project_id)
        if project.paused_at is not None:
            project = replace(project, paused_at=None, paused_by=None, paused_reason=None)
            projects.update_project(tx, project)
            audit.record_action(tx, project.id, actor, "project.resumed", f"project {project.name}", None, now, proved)
    log.warning("project %s is resumed by %s", project.name, actor)
    return project
