"""The chain of the audit log: a change or a removal shows, and those who write at one time write one chain."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
import sqlalchemy as sa
from evalstop_service.projects import audit_trail
from evalstop_service.store import audit, audit_chain
from evalstop_service.store.database import Database, Transaction
from evalstop_service.store.ids import new_id
from evalstop_service.store.tables import audit_chains, audit_log

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def write(database: Database, project_id: UUID, entries: int, start: datetime = NOW) -> None:
    """Write entries a minute apart and chain them."""
    for number in range(entries):
        at = start + timedelta(minutes=number)
        with database.transaction() as tx:
            audit.record_action(tx, project_id, "key a", "key.made", f"key {number}", {"share": 0.1, "é": number}, at)
    audit_trail.chain_waiting(database)


def at(position: int) -> sa.ColumnElement[bool]:
    return audit_log.c.position == position


def rewrite(tx: Transaction, project_id: UUID) -> None:
    """What somebody does who knows how the chain is made: remove an entry and chain all the others anew."""
    tx.execute(audit_log.delete().where(at(3)))
    tx.execute(audit_log.update().values(position=None, previous_hash=None, hash=None))
    tx.execute(audit_chains.update().values(position=0, hash=""))
    audit_chain.chain_entries(tx, project_id)


TAMPERED: dict[str, tuple[Callable[[], Any], str]] = {
    "details changed": (lambda: audit_log.update().where(at(3)).values(details={"share": 0.2}), "entry 3 .* changed"),
    "actor changed": (lambda: audit_log.update().where(at(1)).values(actor="key b"), "entry 1 .* changed"),
    "time changed": (lambda: audit_log.update().where(at(5)).values(at=NOW), "entry 5 .* changed"),
    "removed": (lambda: audit_log.delete().where(at(3)), "entry 3 is missing"),
    "chained once more": (lambda: audit_log.update().where(at(3)).values(position=None), "entry 3 is missing"),
    "first ones removed": (lambda: audit_log.delete().where(audit_log.c.position < 3), "entries 1 to 2 are missing"),
    "last one removed": (lambda: audit_log.delete().where(at(5)), "ends at entry 4, but 5 were written"),
    "all removed": (lambda: audit_log.delete(), "ends at entry 0, but 5 were written"),
}


@pytest.mark.parametrize("name", TAMPERED)
def test_what_was_changed_or_removed_is_found(database: Database, name: str) -> None:
    """Whatever of a chained entry is changed, and whichever is removed, the first that does not fit is named."""
    project_id, (tamper, fault) = new_id(), TAMPERED[name]
    write(database, project_id, 5)
    assert audit_trail.verify_trail(database, project_id).fault is None
    with database.transaction() as tx:
        tx.execute(tamper())
    found = audit_trail.verify_trail(database, project_id).fault
    assert found is not None
    assert pytest.raises(AssertionError, match=fault).matches(AssertionError(found)), found


def test_a_chain_written_anew_lacks_a_hash_that_was_noted(database: Database) -> None:
    """Who can write to the database can write another chain that fits, but not one with the hash that others noted."""
    project_id = new_id()
    write(database, project_id, 5)
    noted = audit_trail.verify_trail(database, project_id).hash
    write(database, project_id, 1)
    assert audit_trail.verify_trail(database, project_id, noted).fault is None
    with database.transaction() as tx:
        rewrite(tx, project_id)
    assert audit_trail.verify_trail(database, project_id).fault is None
    assert audit_trail.verify_trail(database, project_id, noted).fault == f"no entry has the hash {noted}"


def test_a_chain_can_be_checked_without_us(database: Database) -> None:
    """By an export and a few lines of anybody's: a hash is that of its line without it and of the one before."""
    project_id = new_id()
    write(database, project_id, 3)
    before = ""
    for line in audit_trail.export_trail(database, project_id):
        entry = json.loads(line)
        own = entry.pop("hash")
        text = json.dumps(entry, sort_keys=True, separators=(",", ":"))
        assert (entry["previous_hash"], own) == (before, hashlib.sha256(text.encode()).hexdigest())
        before = own
    assert before == audit_trail.verify_trail(database, project_id).hash


def test_those_who_write_at_one_time_write_one_chain(database: Database) -> None:
    """Several processes that write and chain at once lose no entry, and their chain does not fork."""
    project_id, failures = new_id(), []

    def work() -> None:
        try:
            for _ in range(4):
                write(database, project_id, 2)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    report = audit_trail.verify_trail(database, project_id)
    assert (failures, report.fault, report.entries, report.position) == ([], None, 32, 32)


def test_what_is_left_after_old_entries_were_removed_is_verified(database: Database) -> None:
    """An entry that says so is the anchor of the rest, as often as that is done; without it they are missing."""
    project_id = new_id()
    write(database, project_id, 5)
    removed = audit_trail.prune_trail(database, project_id, NOW + timedelta(minutes=2), "dana", NOW)
    write(database, project_id, 2, NOW + timedelta(days=1))
    assert (removed, audit_trail.verify_trail(database, project_id).fault) == (2, None)
    later = NOW + timedelta(days=2)
    assert audit_trail.prune_trail(database, project_id, later, "dana", later) == 6
    assert audit_trail.prune_trail(database, project_id, NOW, "dana", later) == 0
    report = audit_trail.verify_trail(database, project_id)
    assert (report.fault, report.entries, report.position) == (None, 1, 9)
    write(database, project_id, 1, later)
    with database.transaction() as tx:
        tx.execute(audit_log.delete().where(audit_log.c.action == audit_chain.PRUNED))
    assert "entries 1 to 9 are missing" in (audit_trail.verify_trail(database, project_id).fault or "")
