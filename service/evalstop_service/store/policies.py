"""Policies: named, versioned, immutable once stored. Their documents are opaque here."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import UUID

import sqlalchemy as sa

from evalstop_service.store import projects
from evalstop_service.store.database import Transaction, find_all, find_one, match_given
from evalstop_service.store.ids import new_id
from evalstop_service.store.projects import Project
from evalstop_service.store.tables import policies, runs
from evalstop_service.store.tables.projects import StoredPolicy as StoredPolicy


def add_policy(tx: Transaction, project: Project, name: str, document: dict[str, Any], now: datetime) -> StoredPolicy:
    """Store a document as the next version of its name; returns the latest version unchanged if it is equal."""
    projects.lock_project(tx, project.id)  # serializes concurrent writers of one name
    latest = find_policy(tx, project.id, name)
    if latest is not None and latest.document == document:
        return latest
    version = latest.version + 1 if latest else 1
    policy = StoredPolicy(new_id(), project.id, name, version, document, now)
    tx.execute(policies.insert().values(**vars(policy)))
    return policy


def find_policy(tx: Transaction, project_id: UUID, name: str, version: int | None = None) -> StoredPolicy | None:
    """The given version of a project's policy, or its latest."""
    named = match_given({policies.c.project_id: project_id, policies.c.name: name, policies.c.version: version})
    query = sa.select(policies).where(*named)
    return find_one(tx, StoredPolicy, query.order_by(policies.c.version.desc()).limit(1))


def has_runs(tx: Transaction, project_id: UUID, name: str) -> bool:
    """Whether any version of a project's policy has runs."""
    query = sa.select(sa.exists().where(runs.c.project_id == project_id, runs.c.policy_name == name))
    return bool(tx.execute(query).scalar_one())


def get_policy(tx: Transaction, policy_id: UUID) -> StoredPolicy:
    """The policy with this id, which must exist."""
    return StoredPolicy(**tx.execute(sa.select(policies).where(policies.c.id == policy_id)).mappings().one())


def load_latest_versions(tx: Transaction, project_id: UUID) -> dict[str, int]:
    """The latest version of each of a project's policies, by name."""
    query = sa.select(policies.c.name, sa.func.max(policies.c.version)).where(policies.c.project_id == project_id)
    return {row[0]: row[1] for row in tx.execute(query.group_by(policies.c.name))}


def list_policies(tx: Transaction, project_id: UUID) -> list[StoredPolicy]:
    """A project's policies with all versions, by name, newest version first."""
    query = sa.select(policies).where(policies.c.project_id == project_id)
    query = query.order_by(policies.c.name, policies.c.version.desc())
    return find_all(tx, StoredPolicy, query)
