"""The audit log: what was changed, by whom, newest first."""

from __future__ import annotations

from datetime import UTC, datetime
from uuid import UUID

from evalstop_service.store import audit
from evalstop_service.store.database import Database
from evalstop_service.store.ids import new_id

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def keep(database: Database, project_id: UUID, actor: str, action: str, at: datetime = NOW) -> None:
    with database.transaction() as tx:
        audit.record_action(tx, project_id, actor, action, "key trainers", {"scopes": ["ingest"]}, at)


def test_the_log_is_read_by_page_actor_and_kind(database: Database) -> None:
    """A project's entries come newest first, a page at a time, and those alone that were asked for."""
    project_id, other = new_id(), new_id()
    for actor, action in (("key a", "key.made"), ("user Dana", "key.revoked"), ("user Dana", "keyring.made")):
        keep(database, project_id, actor, action)
    keep(database, other, "key a", "key.made")
    with database.reading() as tx:
        everything = audit.list_entries(tx, project_id)
        assert [entry.action for entry in everything] == ["keyring.made", "key.revoked", "key.made"]
        assert (everything[2].actor, everything[2].subject) == ("key a", "key trainers")
        assert everything[2].details == {"scopes": ["ingest"]}
        assert everything[2].at == NOW
        assert audit.list_entries(tx, project_id, limit=1) + audit.list_entries(
            tx, project_id, before=everything[0].id
        ) == (everything)
        assert audit.list_entries(tx, project_id, actor="dana") == everything[:2]
        assert audit.list_entries(tx, project_id, action="key") == everything[1:]
        assert audit.list_entries(tx, project_id, action="key.made") == everything[2:]
        assert audit.list_entries(tx, project_id, action="k_y") == []
