"""What an operator does to an installation as a whole: its first key, projects, keys for them.

All of it is in the audit log of the project, as done by the command line; keys bound to no project are in none.
"""

from __future__ import annotations

import re
import secrets
from datetime import datetime

from evalstop_service.errors import Conflict, Invalid, NotFound
from evalstop_service.projects import policies
from evalstop_service.store import audit, keys, projects
from evalstop_service.store.database import Database, Transaction
from evalstop_service.store.ids import new_id
from evalstop_service.store.keys import SCOPES, Key
from evalstop_service.store.projects import Project

FIRST_PROJECT = "default"
COMMAND_LINE = "command line"
"""The actor: whoever may run commands beside the service, and needs no key for it."""


def first_key(database: Database, now: datetime, held_out_share: float = 0.0) -> str | None:
    """The secret of a key that may do everything in a first project, if there was no key yet; else None."""
    with database.transaction() as tx:
        if keys.any_exists(tx):
            return None
        project = projects.find_by_name(tx, FIRST_PROJECT) or _make(
            tx,
            Project(
                id=new_id(),
                name=FIRST_PROJECT,
                default_policy=policies.DEFAULT_POLICY,
                default_mode="shadow",
                grace_seconds=0.0,
                created_at=now,
                seed=new_seed(),
                held_out_share=held_out_share,
            ),
        )
        return _make_key(tx, project, "first", SCOPES, now)[1]


def any_key(database: Database) -> Key | None:
    """A key in use that may read the first project."""
    with database.reading() as tx:
        project = projects.find_by_name(tx, FIRST_PROJECT)
        found = keys.listing(tx, project.id) if project else []
    readers = (key for key in found if key.revoked_at is None and {"read", "admin"} & set(key.scopes))
    return next(readers, None)


def add_project(
    database: Database,
    name: str,
    mode: str,
    grace_seconds: float,
    now: datetime,
    policy: str = policies.DEFAULT_POLICY,
    *,
    held_out_share: float = 0.0,
    price_per_gpu_hour: float | None = None,
    currency: str = "USD",
) -> Project:
    """Make a project; raises Conflict if there is one of that name, Invalid if there is no such policy."""
    _check_name("project", name)
    if not 0 <= held_out_share <= 1:
        raise Invalid(f"held_out_share is {held_out_share}; it is a share of the stops, 0 to 1")
    if price_per_gpu_hour is not None and not 0 <= price_per_gpu_hour <= 1e6:
        raise Invalid(f"price_per_gpu_hour is {price_per_gpu_hour}; it may be 0 to 1000000")
    if not re.fullmatch("[A-Z]{3}", currency):
        raise Invalid(f"currency is {currency!r}; it has three capital letters, as in USD")
    if not 0 <= grace_seconds <= 30 * 86400:
        raise Invalid(f"grace_seconds is {grace_seconds}; it may be 0 to {30 * 86400}")
    with database.transaction() as tx:
        return _make(
            tx,
            Project(
                id=new_id(),
                name=name,
                default_policy=policy,
                default_mode=mode,
                grace_seconds=grace_seconds,
                created_at=now,
                seed=new_seed(),
                held_out_share=held_out_share,
                price_per_gpu_hour=price_per_gpu_hour,
                currency=currency,
            ),
        )


def add_key(
    database: Database, project_name: str | None, name: str, scopes: tuple[str, ...], now: datetime
) -> tuple[Key, str]:
    """Make a key and give its secret, bound to the project of that name, or (None) to the installation."""
    _check_name("key", name)
    with database.transaction() as tx:
        project = projects.find_by_name(tx, project_name) if project_name is not None else None
        if project_name is not None and project is None:
            raise NotFound(f"there is no project {project_name!r}; `evalstop project create` makes one")
        return _make_key(tx, project, name, tuple(dict.fromkeys(scopes)), now)


def project_named(database: Database, name: str) -> Project:
    """The project of this name; raises NotFound."""
    with database.reading() as tx:
        project = projects.find_by_name(tx, name)
    if project is None:
        raise NotFound(f"there is no project {name!r}; `evalstop project create` makes one")
    return project


def new_seed() -> str:
    """The seed of all that is left to chance in a new project."""
    return secrets.token_hex(16)


def _check_name(noun: str, name: str) -> None:
    if not name.strip() or len(name) > 256 or not name.isprintable():
        raise Invalid(f"{noun} {name!r}: a name has 1 to 256 printable characters")


def _make(tx: Transaction, project: Project) -> Project:
    if not projects.add(tx, project):
        raise Conflict(f"there is a project called {project.name!r} already")
    policies.resolve(tx, project, project.default_policy, project.created_at)
    audit.record(tx, project.id, COMMAND_LINE, "project.made", f"project {project.name}", None, project.created_at)
    return project


def _make_key(
    tx: Transaction, project: Project | None, name: str, scopes: tuple[str, ...], now: datetime
) -> tuple[Key, str]:
    key, secret = keys.add(tx, project_id=project.id if project else None, name=name, scopes=scopes, now=now)
    if project is not None:
        told = {"id": str(key.id), "scopes": list(scopes)}
        audit.record(tx, project.id, COMMAND_LINE, "key.made", f"key {name}", told, now)
    return key, secret
