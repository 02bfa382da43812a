"""The audit log: what people and keys did in a project. An entry is written with the change that it records.

    change + entry, one transaction ──> waiting ──> chained: position, previous_hash, hash

Entries are chained a moment after they were written, by the process that has locked the end of the chain. So opening
a run does not wait for other entries, and the chain never forks. Each chained entry holds the hash of the project's
previous one and of its own content, the SHA-256 of `canonical_json` of the entry without its hash. Changing or removing
a chained entry is detected even without a copy of the last hash; with one (`contains`), rewriting the whole chain is
detected too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any
from uuid import UUID

import sqlalchemy as sa

from evalstop_service.clock import rfc3339
from evalstop_service.store.database import Transaction, find_all, find_page, insert_if_new, match_given
from evalstop_service.store.ids import new_id
from evalstop_service.store.tables import audit_chains, audit_log
from evalstop_service.store.tables.columns import columns_of
from evalstop_service.store.tables.projects import AuditEntry as AuditEntry

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
) -> None:
    """Record an action of `actor`, who is authenticated. No argument may hold a secret."""
    row = {
        "project_id": project_id,
        "id": new_id(),
        "actor": actor,
        "action": action,
        "subject": subject,
        "details": details or {},
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
    query = _select_entries(project_id)
    if actor is not None:
        query = query.where(audit_log.c.actor.icontains(actor, autoescape=True))
    if action is not None:
        kind = audit_log.c.action.startswith(f"{action}.", autoescape=True)
        query = query.where((audit_log.c.action == action) | kind)
    return find_page(tx, AuditEntry, query, audit_log.c.id, before, limit)


_ADD_ENTRY = audit_log.insert()

ENTRIES_AT_A_TIME = 1000


@dataclass(frozen=True)
class ChainReport:
    """The result of verifying a chain. `fault`: the first entry that does not fit, and why; None if all fit."""

    entries: int
    hash: str
    fault: str | None = None


@dataclass(frozen=True)
class _End:
    position: int
    hash: str


def canonical_json(project_id: UUID, entry: AuditEntry) -> str:
    """An entry as ASCII JSON with sorted keys and no spaces; without `hash` while it has none."""
    fields: dict[str, Any] = {**vars(entry), "id": str(entry.id), "at": rfc3339(entry.at)}
    if entry.hash is None:
        del fields["hash"]
    return json.dumps(fields | {"project_id": str(project_id)}, sort_keys=True, separators=(",", ":"))


def compute_hash(project_id: UUID, entry: AuditEntry) -> str:
    """The hash that an entry must have at its position, in hexadecimal."""
    return hashlib.sha256(canonical_json(project_id, replace(entry, hash=None)).encode()).hexdigest()


def list_waiting_projects(tx: Transaction) -> list[UUID]:
    """The projects that have entries to chain."""
    return list(tx.execute(sa.select(audit_log.c.project_id).where(_WAITING).distinct()).scalars())


def chain_entries(tx: Transaction, project_id: UUID) -> int:
    """Append up to `ENTRIES_AT_A_TIME` waiting entries to their project's chain, oldest first; returns their number."""
    end = _lock_end(tx, project_id)
    query = _select_entries(project_id).where(_WAITING).order_by(audit_log.c.id).limit(ENTRIES_AT_A_TIME)
    chained = []
    for waiting in find_all(tx, AuditEntry, query):
        entry = replace(waiting, position=end.position + 1, previous_hash=end.hash)
        end = _End(end.position + 1, compute_hash(project_id, entry))
        chained.append({"of": entry.id, "at_position": end.position, "after": entry.previous_hash, "own": end.hash})
    if chained:
        bound = sa.bindparam
        tx.execute(
            audit_log.update()
            .where(audit_log.c.project_id == project_id, audit_log.c.id == bound("of"))
            .values(position=bound("at_position"), previous_hash=bound("after"), hash=bound("own")),
            chained,
        )
        tx.execute(audit_chains.update().where(audit_chains.c.project_id == project_id).values(vars(end)))
    return len(chained)


def list_chained(
    tx: Transaction, project_id: UUID, *, after: int = 0, since: datetime | None = None, limit: int = ENTRIES_AT_A_TIME
) -> list[AuditEntry]:
    """Chained entries in chain order: after the position `after`, none older than `since`."""
    query = _select_entries(project_id).where(audit_log.c.position > after, *match_given(since={audit_log.c.at: since}))
    return find_all(tx, AuditEntry, query.order_by(audit_log.c.position).limit(limit))


def verify_chain(tx: Transaction, project_id: UUID, contains: str | None = None) -> ChainReport:
    """Verify every chained entry of a project; the statements of `tx` must see one snapshot.

    `contains`: a hash noted earlier, which must be in the chain.
    """
    last, contained = _End(0, ""), contains is None
    for entry in _walk_chain(tx, project_id):
        if fault := _find_fault(project_id, entry, last):
            return ChainReport(last.position, last.hash, fault)
        last = _End(last.position + 1, entry.hash or "")
        contained = contained or last.hash == contains
    row = tx.execute(sa.select(audit_chains).where(audit_chains.c.project_id == project_id)).one_or_none()
    end = _End(0, "") if row is None else _End(row.position, row.hash)
    fault = None
    if last != end:
        fault = f"the chain ends at entry {last.position}, but {end.position} were written"
    elif not contained:
        fault = f"no entry has the hash {contains}"
    return ChainReport(last.position, last.hash, fault)


def _lock_end(tx: Transaction, project_id: UUID) -> _End:
    insert_if_new(tx, audit_chains, {"project_id": project_id, "position": 0, "hash": ""}, ["project_id"])
    query = sa.select(audit_chains.c.position, audit_chains.c.hash).where(audit_chains.c.project_id == project_id)
    return _End(*tx.execute(query.with_for_update()).one())


def _walk_chain(tx: Transaction, project_id: UUID) -> Iterator[AuditEntry]:
    after = 0
    while page := list_chained(tx, project_id, after=after):
        yield from page
        after = page[-1].position or 0


def _find_fault(project_id: UUID, entry: AuditEntry, last: _End) -> str | None:
    expected = last.position + 1
    if entry.position != expected:
        missing = f"entry {expected} is" if entry.position == expected + 1 else f"entries {expected} and on are"
        return f"{missing} missing"
    if entry.previous_hash != last.hash or entry.hash != compute_hash(project_id, entry):
        return f"entry {expected} (id {entry.id}, {entry.action}) was changed"
    return None


def _select_entries(project_id: UUID) -> sa.Select[Any]:
    return sa.select(*columns_of(audit_log, AuditEntry)).where(audit_log.c.project_id == project_id)


_WAITING = audit_log.c.position.is_(None)
