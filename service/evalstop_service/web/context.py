"""What a route is given: the database, the clock, and the caller behind the key."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated
from uuid import UUID

from anyio import CapacityLimiter
from fastapi import Depends, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from evalstop_service.clock import Clock
from evalstop_service.ingest import Committer
from evalstop_service.observability import logs
from evalstop_service.projects.key_cache import KeyCache
from evalstop_service.security.address_policy import AddressPolicy
from evalstop_service.security.encryption import Encryption
from evalstop_service.store.audit import Author
from evalstop_service.store.database import Database
from evalstop_service.store.keys import Key
from evalstop_service.web.problems import Problem


@dataclass(frozen=True)
class PullWaiters:
    """Receivers that wait for an event to fetch: `requests` bounds how many, `threads` those that ask the database.

    The other routes have threads of their own, so that waiting receivers never hold them up.
    """

    requests: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(200))
    threads: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(4))


@dataclass(frozen=True)
class Context:
    """What create_app hands to the routes."""

    database: Database
    clock: Clock
    committer: Committer
    key_cache: KeyCache
    address_policy: AddressPolicy = field(default_factory=AddressPolicy)
    encryption: Encryption = field(default_factory=Encryption)
    delivery_timeout_seconds: float = 10.0
    pull_waiters: PullWaiters = field(default_factory=PullWaiters)
    scrape_threads: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(2))


@dataclass(frozen=True)
class Caller:
    """A key that may do what the route asks for, in its project."""

    key: Key
    project_id: UUID

    @property
    def actor(self) -> str:
        """As what the key does is written down."""
        return f"key {self.key.name}"

    def author(self, now: datetime) -> Author:
        """Who changes something now."""
        return Author(self.project_id, self.actor, now)


def _context(request: Request) -> Context:
    context: Context = request.app.state.context
    return context


def _database(context: Annotated[Context, Depends(_context)]) -> Database:
    return context.database


def _clock(context: Annotated[Context, Depends(_context)]) -> Clock:
    return context.clock


def _now(context: Annotated[Context, Depends(_context)]) -> datetime:
    return context.clock()


def _committer(context: Annotated[Context, Depends(_context)]) -> Committer:
    return context.committer


def _key_cache(context: Annotated[Context, Depends(_context)]) -> KeyCache:
    return context.key_cache


def _address_policy(context: Annotated[Context, Depends(_context)]) -> AddressPolicy:
    return context.address_policy


def _encryption(context: Annotated[Context, Depends(_context)]) -> Encryption:
    return context.encryption


Ctx = Annotated[Context, Depends(_context)]
Db = Annotated[Database, Depends(_database)]
Now = Annotated[datetime, Depends(_now)]
Tell = Annotated[Clock, Depends(_clock)]
"""For what is answered after a wait: the time then."""
Commit = Annotated[Committer, Depends(_committer)]
Keys = Annotated[KeyCache, Depends(_key_cache)]
Secrets = Annotated[Encryption, Depends(_encryption)]
Allowed = Annotated[AddressPolicy, Depends(_address_policy)]

_bearer = HTTPBearer(auto_error=False, description="A key made by `evalstop key create` or POST /api/v1/keys.")
Bearer = Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]

UNAUTHORIZED = Problem(
    401,
    "No valid key",
    "send `Authorization: Bearer esk_...` with a key that is in use; `evalstop key create` makes one",
    headers={"WWW-Authenticate": "Bearer"},
)


def _key(bearer: Bearer, key_cache: Keys) -> Key:
    key = key_cache.authenticate(bearer.credentials) if bearer is not None else None
    if key is None:
        raise UNAUTHORIZED
    return key


async def insist_on_key(request: Request) -> None:
    """Raise Problem unless a valid key speaks: before a body is read and unfolded for nobody."""
    key_cache = _context(request).key_cache
    scheme, _, secret = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not (
        key_cache.get(secret) or await run_in_threadpool(key_cache.authenticate, secret)
    ):
        raise UNAUTHORIZED


AnyKey = Annotated[Key, Depends(_key)]


def may(*scopes: str) -> Callable[[Key], Caller]:
    """A dependency: the caller, if the key is bound to a project and has one of the scopes (or `admin`)."""

    def caller(key: AnyKey) -> Caller:
        return allowed(key, *scopes)

    return caller


def allowed(key: Key, *scopes: str) -> Caller:
    """The caller behind a key, if it is bound to a project and has one of the scopes (or `admin`). Raises Problem."""
    if not {*scopes, "admin"} & set(key.scopes):
        raise Problem(403, "The key may not do this", f"it has {_list(key.scopes)}; this needs {_list(scopes)}")
    if key.project_id is None:
        raise Problem(
            403,
            "The key is bound to no project",
            "a key to the installation makes and lists projects, and makes their keys",
        )
    logs.add_log_context(project_id=key.project_id)
    return Caller(key, key.project_id)


def _list(scopes: tuple[str, ...]) -> str:
    return " or ".join(scopes)


Ingest = Annotated[Caller, Depends(may("ingest"))]
Read = Annotated[Caller, Depends(may("read"))]
ReadOrIngest = Annotated[Caller, Depends(may("read", "ingest"))]
Operate = Annotated[Caller, Depends(may("operate"))]
Admin = Annotated[Caller, Depends(may("admin"))]


def installation(key: AnyKey) -> Key:
    """A dependency: the key, if it is to the whole installation."""
    if key.project_id is not None or "admin" not in key.scopes:
        raise Problem(
            403,
            "The key is bound to one project",
            "this is done with a key to the installation; `evalstop key create --installation` makes one",
        )
    return key


Installation = Annotated[Key, Depends(installation)]
