"""Reading the audit log."""

from __future__ import annotations

from datetime import UTC, datetime
from uuid import UUID

from evalstop_service.store import audit
from evalstop_service.store.database import Database
from evalstop_service.store.ids import new_id

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def record_action(database: Database, project_id: UUID, actor: str, action: str, at: datetime = NOW) -> None:
    with database.transaction() as tx:
        audit.record_action(tx, project_id, actor, action, "key trainers", {"scopes": ["ingest"]}, at)


def test_log_is_read_by_page_actor_and_action(database: Database) -> None:
    """Entries of a project come newest first, by page, and filtered by actor and action."""
    project_id, other_project_id = new_id(), new_id()
    for actor, action in (("key a", "key.created"), ("user Dana", "key.revoked"), ("user Dana", "keyring.created")):
        record_action(database, project_id, actor, action)
    record_action(database, other_project_id, "key a", "key.created")
    with database.reading() as tx:
        entries = audit.list_entries(tx, project_id)
        assert [entry.action for entry in entries] == ["keyring.created", "key.revoked", "key.created"]
        assert (entries[2].actor, entries[2].subject) == ("key a", "key trainers")
        assert entries[2].details == {"scopes": ["ingest"]}
        assert entries[2].at == NOW
        assert audit.list_entries(tx, project_id, limit=1) + audit.list_entries(
            tx, project_id, before=entries[0].id
        ) == (entries)
        assert audit.list_entries(tx, project_id, actor="dana") == entries[:2]
        assert audit.list_entries(tx, project_id, action="key") == entries[1:]
        assert audit.list_entries(tx, project_id, action="key.created") == entries[2:]
        assert audit.list_entries(tx, project_id, action="k_y") == []
