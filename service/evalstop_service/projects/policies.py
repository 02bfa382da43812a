"""The policies of a project: its own, and those that are shipped, which are stored when they are first used."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from evalstop_detectors import POLICIES, InvalidPolicy, Policy, policy_from_document, policy_to_document

from evalstop_service.errors import Invalid
from evalstop_service.store import audit, policies, projects
from evalstop_service.store.database import Database, Transaction
from evalstop_service.store.policies import StoredPolicy
from evalstop_service.store.projects import Project

log = logging.getLogger(__name__)

DEFAULT_POLICY = "default"


@dataclass(frozen=True)
class Shipped:
    """A policy that comes with the release and is not on record in the project: it has no id yet."""

    name: str
    document: dict[str, Any]
    version: int = 1
    id: None = None
    created_at: None = None

    @property
    def reference(self) -> str:
        """What it is asked for by."""
        return f"{self.name}@{self.version}"


Version = StoredPolicy | Shipped
"""One version of a policy."""


def listing(tx: Transaction, project_id: UUID) -> list[Version]:
    """All versions of all policies, by name, the newest first."""
    own = policies.list_policies(tx, project_id)
    names = {policy.name for policy in own}
    shipped = [_shipped(name) for name in POLICIES if name not in names]
    return sorted([*own, *shipped], key=lambda policy: (policy.name, -policy.version))


def find(tx: Transaction, project_id: UUID, name: str, version: int | None = None) -> Version | None:
    """That version of a policy, or its latest."""
    found = policies.find_policy(tx, project_id, name, version)
    return _shipped(name) if found is None and name in POLICIES and version in (None, 1) else found


def referred(tx: Transaction, project_id: UUID, reference: str) -> Version:
    """The policy that `NAME` (its latest version) or `NAME@VERSION` refers to; raises Invalid with those there are."""
    name, _, version = reference.partition("@")
    if version and not (version.isdecimal() and len(version) <= 9):  # what the database's integer holds
        raise Invalid(f"policy {reference!r}: after the @ comes a version number, as in paper@1")
    found = find(tx, project_id, name, int(version) if version else None)
    if found is None:
        known = sorted({policy.name for policy in listing(tx, project_id)})
        raise Invalid(f"there is no policy {reference!r} in this project; there are {', '.join(known)}")
    return found


def resolve(tx: Transaction, project: Project, reference: str, now: datetime) -> StoredPolicy:
    """The policy that is referred to, to be used from now on: a shipped one is stored. Raises Invalid."""
    return _stored(tx, project, referred(tx, project.id, reference), now)


def add(tx: Transaction, project: Project, policy: Policy, now: datetime) -> StoredPolicy:
    """Store a policy as the next version of its name, after the shipped one; the latest version if it says the same."""
    latest = find(tx, project.id, policy.name)
    if latest is not None:
        _stored(tx, project, latest, now)
    return policies.add_policy(tx, project, policy.name, policy_to_document(policy), now)


def add_policy(database: Database, project_id: UUID, actor: str, policy: Policy, now: datetime) -> StoredPolicy:
    """Store a policy as the next version of its name, in the audit log; gives the latest version if it is the same."""
    with database.transaction() as tx:
        project = projects.get_project(tx, project_id)
        before = find(tx, project.id, policy.name)
        stored = add(tx, project, policy, now)
        if before is None or stored.version != before.version:
            details = {"id": str(stored.id)}
            audit.record_action(tx, project_id, actor, "policy.added", f"policy {stored.reference}", details, now)
        return stored


def read(tx: Transaction, policy_id: UUID) -> Policy | None:
    """The policy with this id, which a run refers to; None, and a line in the log, when a later release stored it and
    this one cannot read it."""
    stored = policies.get_policy(tx, policy_id)
    try:
        return policy_from_document(stored.document)
    except InvalidPolicy as error:
        log.warning("policy %s, %s, is of a later release and cannot be read: %s", policy_id, stored.reference, error)
        return None


def _stored(tx: Transaction, project: Project, policy: Version, now: datetime) -> StoredPolicy:
    if isinstance(policy, StoredPolicy):
        return policy
    return policies.add_policy(tx, project, policy.name, policy.document, now)


def _shipped(name: str) -> Shipped:
    return Shipped(name, policy_to_document(POLICIES[name]))
