"""What administrators of a project do: its settings, its keys, its policies. All of it is in the audit log."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any
from uuid import UUID

from evalstop_detectors import Policy

from evalstop_service.errors import Conflict, NotFound
from evalstop_service.projects import policies
from evalstop_service.store import audit, keys, projects
from evalstop_service.store.database import Database
from evalstop_service.store.keys import Key
from evalstop_service.store.policies import StoredPolicy
from evalstop_service.store.projects import Project


def add_project(database: Database, project: Project, actor: str, now: datetime) -> Project:
    """Store a new project; raises Conflict if there is one of its name, Invalid if there is no such policy."""
    with database.transaction() as tx:
        if not projects.add(tx, project):
            raise Conflict(f"there is a project called {project.name!r} already")
        policies.resolve(tx, project, project.default_policy, now)
        audit.record(tx, project.id, actor, "project.made", f"project {project.name}", None, now)
    return project


def change_project(
    database: Database, project_id: UUID, actor: str, changes: Mapping[str, Any], now: datetime
) -> Project:
    """Change settings of a project; raises Invalid when its default policy does not exist."""
    with database.transaction() as tx:
        before = projects.lock(tx, project_id)
        project = replace(before, **changes)
        policies.resolve(tx, project, project.default_policy, now)
        told = {name: value for name, value in changes.items() if getattr(before, name) != value}
        if told:
            projects.change(tx, project)
            audit.record(tx, project.id, actor, "project.changed", f"project {project.name}", told, now)
    return project


def make_key(
    database: Database, project_id: UUID, actor: str, name: str, scopes: Iterable[str], now: datetime
) -> tuple[Key, str]:
    """Make a key of a project, and give its secret."""
    with database.transaction() as tx:
        wanted = tuple(sorted(set(scopes)))
        key, secret = keys.add(tx, project_id=project_id, name=name, scopes=wanted, now=now)
        told = {"id": str(key.id), "scopes": list(wanted)}
        audit.record(tx, project_id, actor, "key.made", f"key {name}", told, now)
    return key, secret


def revoke_key(database: Database, project_id: UUID, actor: str, key_id: UUID, now: datetime) -> None:
    """Take a key out of use for good; raises NotFound. Whoever remembers keys has to forget them then."""
    with database.transaction() as tx:
        key = keys.revoke(tx, project_id, key_id, now)
        if key is None:
            raise NotFound(f"there is no key {key_id} in use in this project")
        audit.record(tx, project_id, actor, "key.revoked", f"key {key.name}", {"id": str(key_id)}, now)


def add_policy(database: Database, project_id: UUID, actor: str, policy: Policy, now: datetime) -> StoredPolicy:
    """Store a policy as the next version of its name, or find that the latest says the same."""
    with database.transaction() as tx:
        project = projects.get(tx, project_id)
        before = policies.find(tx, project.id, policy.name)
        stored = policies.add(tx, project, policy, now)
        if before is None or stored.version != before.version:
            told = {"id": str(stored.id)}
            audit.record(tx, project_id, actor, "policy.added", f"policy {stored.reference}", told, now)
        return stored
