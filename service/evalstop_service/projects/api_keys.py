"""API keys: created, listed and revoked. Changes are in the audit log of their project; keys to the installation,
which are bound to no project, are in none."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from uuid import UUID

from evalstop_service.errors import Invalid, NotFound
from evalstop_service.projects.key_cache import KeyCache
from evalstop_service.projects.project_settings import NewProject, find_project, insert_project
from evalstop_service.store import audit, keys, projects
from evalstop_service.store.audit import Author
from evalstop_service.store.database import Database, Transaction
from evalstop_service.store.keys import SCOPES, Key

FIRST_PROJECT = "default"
COMMAND_LINE = "command line"
"""The actor of commands, which need no key."""


def create_key(
    database: Database, project_id: UUID | None, actor: str, name: str, scopes: Iterable[str], now: datetime
) -> tuple[Key, str]:
    """Create a key of a project or, with None, of the installation; gives its secret, which is stored nowhere."""
    with database.transaction() as tx:
        return _insert_key(tx, project_id, actor, name, scopes, now)


def create_key_in_project(
    database: Database, project_id: UUID, actor: str, name: str, scopes: Iterable[str], now: datetime
) -> tuple[Key, str]:
    """Create a key of a project that somebody names who is not in it; raises NotFound when there is no such project."""
    with database.transaction() as tx:
        if projects.find_project(tx, project_id) is None:
            raise NotFound(f"there is no project {project_id}")
        return _insert_key(tx, project_id, actor, name, scopes, now)


def create_named_key(
    database: Database, project_name: str | None, name: str, scopes: Iterable[str], now: datetime
) -> tuple[Key, str]:
    """Create a key from the command line, for the project of that name; raises NotFound and Invalid."""
    if not name.strip() or len(name) > 256 or not name.isprintable():
        raise Invalid(f"key {name!r}: a name has 1 to 256 printable characters")
    project_id = None if project_name is None else find_project(database, project_name).id
    return create_key(database, project_id, COMMAND_LINE, name, scopes, now)


def create_first_key(database: Database, now: datetime, held_out_share: float = 0.0) -> str | None:
    """The secret of a key with all scopes in the project `default`, which is created too; None if any key exists."""
    with database.transaction() as tx:
        if keys.has_any_key(tx):
            return None
        project = projects.find_project_by_name(tx, FIRST_PROJECT) or insert_project(
            tx, NewProject(name=FIRST_PROJECT, held_out_share=held_out_share), COMMAND_LINE, now
        )
        return _insert_key(tx, project.id, COMMAND_LINE, "first", SCOPES, now)[1]


def find_reading_key(database: Database) -> Key | None:
    """A key in use that may read the project `default`."""
    with database.reading() as tx:
        project = projects.find_project_by_name(tx, FIRST_PROJECT)
        listed = keys.list_keys(tx, project.id) if project else []
    readers = (key for key in listed if key.revoked_at is None and {"read", "admin"} & set(key.scopes))
    return next(readers, None)


def revoke_key(database: Database, key_cache: KeyCache, author: Author, key_id: UUID) -> None:
    """Revoke a key for good; raises NotFound. Other processes accept it until their caches expire."""
    with database.transaction() as tx:
        key = keys.revoke_key(tx, author.project_id, key_id, author.at)
        if key is None:
            raise NotFound(f"there is no key {key_id} in use in this project")
        author.record(tx, "key.revoked", f"key {key.name}", {"id": str(key_id)})
    key_cache.clear()


def _insert_key(
    tx: Transaction, project_id: UUID | None, actor: str, name: str, scopes: Iterable[str], now: datetime
) -> tuple[Key, str]:
    granted = tuple(scope for scope in SCOPES if scope in set(scopes))
    key, secret = keys.create_key(tx, project_id=project_id, name=name, scopes=granted, now=now)
    if project_id is not None:
        details = {"id": str(key.id), "scopes": list(granted)}
        audit.record_action(tx, project_id, actor, "key.made", f"key {name}", details, now)
    return key, secret
