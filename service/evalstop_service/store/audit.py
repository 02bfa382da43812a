"""The audit log: what people and keys did in a project. An entry is written with the change that it records.

Entries are chained a moment later; see `store.audit_chain`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import sqlalchemy as sa

from evalstop_service.store.database import Transaction, contains_text, find_page
from evalstop_service.store.ids import new_id
from evalstop_service.store.tables import audit_log


@dataclass(frozen=True)
class AuditEntry:
    """One change. `action`: what was done (`key.created`). `subject`: to what (`key trainers`). `details`: how.

    `position`, `previous_hash`, `hash`: its place in the project's chain (`store.audit_chain`); None until it is
    chained.
    """

    id: UUID
    actor: str
    action: str
    subject: str
    details: dict[str, Any]
    at: datetime
    position: int | None = None
    previous_hash: str | None = None
    hash: str | None = None


INSTALLATION = UUID(int=0)
"""The project of entries about the whole installation."""


@dataclass(frozen=True)
class Author:
    """The authenticated author of a change in a project, and when it was made.

    `identity`: distinguishes authors whose names may be equal; empty: `actor` does.
    """

    project_id: UUID
    actor: str
    at: datetime
    identity: str = ""

    def record(self, tx: Transaction, action: str, subject: str, details: dict[str, Any] | None = None) -> None:
        """Record an action of this author."""
        record_action(tx, self.project_id, self.actor, action, subject, details, self.at)


def record_action(
    tx: Transaction,
    project_id: UUID,
    actor: str,
    action: str,
    subject: str,
    details: dict[str, Any] | None,
    now: datetime,
    proved: str | None = None,
) -> None:
    """Record an action of `actor`, who is authenticated. No argument may hold a secret.

    `proved`: the authenticated identity, where `actor` is only claimed; the claim is then kept as the detail `said_by`.
    """
    claim = {} if proved in (None, actor) else {"said_by": actor}
    row = {
        "project_id": project_id,
        "id": new_id(),
        "actor": proved or actor,
        "action": action,
        "subject": subject,
        "details": claim | (details or {}),
        "at": now,
    }
    tx.execute(_ADD_ENTRY, row)


def list_entries(
    tx: Transaction,
    project_id: UUID,
    *,
    actor: str | None = None,
    action: str | None = None,
    before: UUID | None = None,
    limit: int = 50,
) -> list[AuditEntry]:
    """The entries of a project that are older than the entry `before`, newest first.

    `actor`: only authors whose name contains this. `action`: exactly this, or every action with this prefix (`key`).
    """
    query = sa.select(*COLUMNS).where(audit_log.c.project_id == project_id)
    if actor is not None:
        query = query.where(contains_text(audit_log.c.actor, actor))
    if action is not None:
        kind = audit_log.c.action.startswith(f"{action}.", autoescape=True)
        query = query.where((audit_log.c.action == action) | kind)
    return find_page(tx, AuditEntry, query, audit_log.c.id, before, limit)


_ADD_ENTRY = audit_log.insert()

COLUMNS = [column for column in audit_log.c if column.name != "project_id"]
"""The columns of an entry, in the order of its fields."""
