"""Pausing a project: while it is paused, no stop is requested."""

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
    """Pause a project; returns when all its pending stops are on hold. Pausing a paused project changes nothing.

    1. Set the pause under the lock that every decision takes: a stop is either stored before it, or sees the pause.
    2. Put the pending stops on hold, each in its own transaction, so that many runs are never locked at once. If that
       is interrupted, `deadlines` puts the others on hold.

    `actor` is the name that the caller gives, `proved` the authenticated identity, where they differ.
    """
    with database.transaction() as tx:
        project = projects.lock_project(tx, project_id)
        if project.paused_at is None:
            project = replace(project, paused_at=now, paused_by=actor, paused_reason=reason or None)
            projects.update_project(tx, project)
            subject, details = f"project {project.name}", {"reason": reason}
            audit.record_action(tx, project.id, actor, "project.paused", subject, details, now, proved)
    held_count = transitions.hold_pending_stops(database, project_id, guards.find_pause(project), now)
    log.warning("project %s is paused by %s; %d stops are on hold", project.name, project.paused_by, held_count)
    return project


def resume_project(
    database: Database, project_id: UUID, actor: str, now: datetime, proved: str | None = None
) -> Project:
    """Allow stops in a project again; the guards of stops on hold are checked again within a minute."""
    with database.transaction() as tx:
        project = projects.lock_project(tx, project_id)
        if project.paused_at is not None:
            project = replace(project, paused_at=None, paused_by=None, paused_reason=None)
            projects.update_project(tx, project)
            audit.record_action(tx, project.id, actor, "project.resumed", f"project {project.name}", None, now, proved)
    log.warning("project %s is resumed by %s", project.name, actor)
    return project
