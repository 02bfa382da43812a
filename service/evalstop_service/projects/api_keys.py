"""API keys and sessions: created, listed and ended. Changes are in the audit log of the project or the installation."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any
from uuid import UUID

from evalstop_service.clock import rfc3339
from evalstop_service.errors import Invalid, OtherProject, require
from evalstop_service.projects.key_cache import KeyCache
from evalstop_service.projects.project_settings import NewProject, require_project
from evalstop_service.security.address_policy import check_network
from evalstop_service.store import audit, counts, endpoints, keys, projects
from evalstop_service.store.audit import Author
from evalstop_service.store.database import Database, Transaction
from evalstop_service.store.keys import SCOPES, UNLIMITED, Key, KeyLimits, Session

FIRST_PROJECT = "default"
COMMAND_LINE = "command line"
"""The actor of commands, which require no key."""


def create_key(
    database: Database,
    project_id: UUID | None,
    actor: str,
    name: str,
    scopes: Iterable[str],
    now: datetime,
    limits: KeyLimits = UNLIMITED,
) -> tuple[Key, str]:
    """Create a key of a project or, with None, of the installation; returns its secret, which is not stored.

    Raises Invalid for limits that cannot be enforced, and NotFound when there is no such project.
    """
    with database.transaction() as tx:
        if project_id is not None:
            require(projects.find_project(tx, project_id), f"project {project_id}")
        return _insert_key(tx, project_id, actor, name, scopes, now, limits)


def create_first_key(database: Database, now: datetime, project_settings: NewProject | None = None) -> str | None:
    """The secret of a key with all scopes in the project `default`, which is created too; None if any key exists."""
    with database.transaction() as tx:
        keys.lock_keys(tx)  # of two processes that start together, one creates the key
        if keys.has_any_key(tx):
            return None
        settings = project_settings or NewProject(name=FIRST_PROJECT, held_out_share=0.0)
        project = require_project(tx, settings, COMMAND_LINE, now)
        return _insert_key(tx, project.id, COMMAND_LINE, "first", SCOPES, now)[1]


def find_reading_key(database: Database, now: datetime) -> Key | None:
    """A valid key that may read the project `default` from anywhere."""
    with database.reading() as tx:
        project = projects.find_project_by_name(tx, FIRST_PROJECT)
        valid_keys = keys.list_keys_in_use(tx, project.id, now) if project else []
    return next((key for key in valid_keys if not key.networks and {"read", "admin"} & {*key.scopes}), None)


def revoke_key(database: Database, key_cache: KeyCache, author: Author, key_id: UUID) -> None:
    """Revoke a key; raises NotFound. Other processes accept it until their caches expire."""
    with database.transaction() as tx:
        found = keys.revoke_key(tx, author.project_id, key_id, author.at)
        key = require(found, f"key {key_id} in use in this project")
        author.record(tx, "key.revoked", f"key {key.name}", {"id": str(key_id)})
    key_cache.clear()


def refuse_key_of_another_project(database: Database, project_id: UUID, key_hash: str) -> None:
    """Raise OtherProject if the key with this hash, valid or not, belongs to another project."""
    with database.reading() as tx:
        if keys.find_project_id(tx, key_hash) not in (None, project_id):
            raise OtherProject


def _insert_key(
    tx: Transaction,
    project_id: UUID | None,
    actor: str,
    name: str,
    scopes: Iterable[str],
    now: datetime,
    limits: KeyLimits = UNLIMITED,
) -> tuple[Key, str]:
    granted = tuple(scope for scope in SCOPES if scope in set(scopes))
    _require_sound_limits(tx, project_id, granted, now, limits)
    if project_id is not None:
        counts.require_room(tx, projects.lock_project(tx, project_id), "keys", now)
    key, secret = keys.create_key(tx, project_id=project_id, name=name, scopes=granted, now=now, limits=limits)
    details: dict[str, Any] = {"id": str(key.id), "scopes": list(granted)}
    if limits != UNLIMITED:
        expires = None if limits.expires_at is None else rfc3339(limits.expires_at)
        ids = list(map(str, limits.endpoint_ids))
        details |= {"expires_at": expires, "networks": list(limits.networks), "endpoint_ids": ids}
    audit.record_action(tx, project_id or audit.INSTALLATION, actor, "key.created", f"key {name}", details, now)
    return key, secret


def _require_sound_limits(
    tx: Transaction, project_id: UUID | None, scopes: tuple[str, ...], now: datetime, limits: KeyLimits
) -> None:
    if limits.expires_at is not None and limits.expires_at <= now:
        raise Invalid("expires_at: it lies in the past")
    for network in limits.networks:
        try:
            check_network(network)
        except ValueError as error:
            raise Invalid(f"networks: {error}") from None
    if limits.endpoint_ids and scopes != ("report",):
        raise Invalid("endpoint_ids: only a key with the single scope report, for one scheduler, can have them")
    for endpoint_id in limits.endpoint_ids:
        if project_id is None or endpoints.find_endpoint(tx, project_id, endpoint_id) is None:
            raise Invalid(f"endpoint_ids: there is no endpoint {endpoint_id} in this project")


def list_sessions(tx: Transaction, project_id: UUID, now: datetime) -> list[Session]:
    """The sessions with access to the project, oldest first."""
    return keys.list_sessions(tx, project_id, projects.get_project(tx, project_id).name, now)


def end_session(database: Database, author: Author, session_id: UUID) -> None:
    """End a session, for all its projects; raises NotFound when it has no access to this one."""
    with database.transaction() as tx:
        listed = {session.id: session for session in list_sessions(tx, author.project_id, author.at)}
        session = require(listed.get(session_id), f"session {session_id} in this project")
        keys.delete_session(tx, session_id)
        author.record(tx, "session.ended", f"session of {session.name}", {"id": str(session_id)})
