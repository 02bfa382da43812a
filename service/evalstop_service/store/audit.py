"""The audit log: what people and keys did in a project. Each row is added with what it tells of, and chained later."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import sqlalchemy as sa

from evalstop_service.store.database import Transaction, contains_text
from evalstop_service.store.ids import new_id
from evalstop_service.store.tables import audit_log


@dataclass(frozen=True)
class AuditEntry:
    """One change. `action` is what was done (`key.made`), `subject` to what (`key trainers`), `details` how.

    `position`, `previous_hash`, `hash`: in the chain of its project (`store.audit_chain`); None until it is there.
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
"""In the place of a project: what was done to the whole installation."""


@dataclass(frozen=True)
class Author:
    """Who changes something in a project, as they have proved to be, and when.

    `identity`: by which they are told from others, where names may be alike; empty: by `actor`.
    """

    project_id: UUID
    actor: str
    at: datetime
    identity: str = ""

    def record(self, tx: Transaction, action: str, subject: str, details: dict[str, Any] | None = None) -> None:
        """Write down that they did this."""
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
    """Write down that `actor`, who has proved to be it, did this. Nothing secret may be in any of it.

    `proved`: who it was, where `actor` is only what they say; the detail `said_by` is the latter then.
    """
    said = {} if proved in (None, actor) else {"said_by": actor}
    tx.execute(
        audit_log.insert().values(
            project_id=project_id,
            id=new_id(),
            actor=proved or actor,
            action=action,
            subject=subject,
            details=said | (details or {}),
            at=now,
        )
    )


def list_entries(
    tx: Transaction,
    project_id: UUID,
    *,
    actor: str | None = None,
    action: str | None = None,
    before: UUID | None = None,
    limit: int = 50,
) -> list[AuditEntry]:
    """What was changed in a project, newest first, before the entry `before`.

    `actor`: by those alone with this in their name. `action`: this one, or (`key`) all that begin with it (`key.made`).
    """
    query = sa.select(*COLUMNS).where(audit_log.c.project_id == project_id)
    if actor is not None:
        query = query.where(contains_text(audit_log.c.actor, actor))
    if action is not None:
        kind = audit_log.c.action.startswith(f"{action}.", autoescape=True)
        query = query.where((audit_log.c.action == action) | kind)
    if before is not None:
        query = query.where(audit_log.c.id < before)
    return [AuditEntry(*row) for row in tx.execute(query.order_by(audit_log.c.id.desc()).limit(limit))]


COLUMNS = [column for column in audit_log.c if column.name != "project_id"]
"""Of an entry, in the order of its fields."""
