"""The audit log, and its hash chain: tampering is found, and concurrent writers extend one chain."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
import sqlalchemy as sa
from evalstop_service.projects import audit_trail
from evalstop_service.store import audit
from evalstop_service.store.database import Database, Transaction
from evalstop_service.store.ids import new_id
from evalstop_service.store.tables import audit_chains, audit_log

from tests.service.concurrency import run_concurrently

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def record_entries(database: Database, project_id: UUID, entries: int, start: datetime = NOW) -> None:
    """Record entries a minute apart and chain them."""
    for number in range(entries):
        moment = start + timedelta(minutes=number)
        with database.transaction() as tx:
            audit.record_action(
                tx, project_id, "key a", "key.created", f"key {number}", {"share": 0.1, "é": number}, moment
            )
    audit_trail.chain_waiting(database)


def at_position(position: int) -> sa.ColumnElement[bool]:
    return audit_log.c.position == position


def rewrite_chain(tx: Transaction, project_id: UUID) -> None:
    """Remove an entry and chain the others again, as an attacker with write access would."""
    tx.execute(audit_log.delete().where(at_position(3)))
    tx.execute(audit_log.update().values(position=None, previous_hash=None, hash=None))
    tx.execute(audit_chains.update().values(position=0, hash=""))
    audit.chain_entries(tx, project_id)


TAMPERINGS: dict[str, tuple[Callable[[], Any], str]] = {
    "details changed": (
        lambda: audit_log.update().where(at_position(3)).values(details={"share": 0.2}),
        "entry 3 .* changed",
    ),
    "actor changed": (lambda: audit_log.update().where(at_position(1)).values(actor="key b"), "entry 1 .* changed"),
    "time changed": (lambda: audit_log.update().where(at_position(5)).values(at=NOW), "entry 5 .* changed"),
    "removed": (lambda: audit_log.delete().where(at_position(3)), "entry 3 is missing"),
    "chained once more": (lambda: audit_log.update().where(at_position(3)).values(position=None), "entry 3 is missing"),
    "first ones removed": (lambda: audit_log.delete().where(audit_log.c.position < 3), "entries 1 and on are missing"),
    "last one removed": (lambda: audit_log.delete().where(at_position(5)), "ends at entry 4, but 5 were written"),
    "all removed": (lambda: audit_log.delete(), "ends at entry 0, but 5 were written"),
}


@pytest.mark.parametrize("name", TAMPERINGS)
def test_changed_or_removed_entry_is_found(database: Database, name: str) -> None:
    """Verification names the first entry that was changed or removed."""
    project_id, (tamper, fault) = new_id(), TAMPERINGS[name]
    record_entries(database, project_id, 5)
    assert audit_trail.verify_trail(database, project_id).fault is None
    with database.transaction() as tx:
        tx.execute(tamper())
    reported = audit_trail.verify_trail(database, project_id).fault
    assert reported is not None
    assert pytest.raises(AssertionError, match=fault).matches(AssertionError(reported)), reported


def test_rewritten_chain_lacks_a_known_hash(database: Database) -> None:
    """A rewritten chain is consistent, but does not contain a hash that was noted elsewhere before."""
    project_id = new_id()
    record_entries(database, project_id, 5)
    known_hash = audit_trail.verify_trail(database, project_id).hash
    record_entries(database, project_id, 1)
    assert audit_trail.verify_trail(database, project_id, known_hash).fault is None
    with database.transaction() as tx:
        rewrite_chain(tx, project_id)
    assert audit_trail.verify_trail(database, project_id).fault is None
    assert audit_trail.verify_trail(database, project_id, known_hash).fault == f"no entry has the hash {known_hash}"


def test_exported_chain_verifies_with_hashlib_alone(database: Database) -> None:
    """A line's hash is the SHA-256 of the line without its hash, which includes the previous hash."""
    project_id = new_id()
    record_entries(database, project_id, 3)
    previous_hash = ""
    audit_trail.chain_waiting(database)
    with database.reading() as tx:
        chained = audit.list_chained(tx, project_id)
    for changed in chained:
        entry = json.loads(audit.canonical_json(project_id, changed))
        own_hash = entry.pop("hash")
        text = json.dumps(entry, sort_keys=True, separators=(",", ":"))
        assert (entry["previous_hash"], own_hash) == (previous_hash, hashlib.sha256(text.encode()).hexdigest())
        previous_hash = own_hash
    assert previous_hash == audit_trail.verify_trail(database, project_id).hash


def test_concurrent_writers_extend_one_chain(database: Database) -> None:
    """Threads that write and chain concurrently lose no entry, and the chain does not fork."""
    project_id = new_id()

    def record_repeatedly() -> None:
        for _ in range(4):
            record_entries(database, project_id, 2)

    failures = run_concurrently(*[record_repeatedly] * 4)
    report = audit_trail.verify_trail(database, project_id)
    assert (failures, report.fault, report.entries) == ([], None, 32)


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


@pytest.mark.parametrize("part", ["100%", "a_b", "\\", "PPO"])
def test_search_has_no_special_characters(database: Database, part: str) -> None:
    """A search for an author matches its text literally, in either case."""
    project_id = new_id()
    with database.transaction() as tx:
        for name in ("100% done", "100 done", "a_b", "axb", "back\\slash", "ppo-7b"):
            audit.record_action(tx, project_id, name, "key.created", "key", None, NOW)
        (found,) = audit.list_entries(tx, project_id, actor=part)
    assert part.lower() in found.actor
