"""Routes of API keys: list, create, revoke."""

from __future__ import annotations

from typing import Annotated
from uuid import UUID

from fastapi import APIRouter
from pydantic import Field

from evalstop_service.projects import api_keys
from evalstop_service.store import keys
from evalstop_service.web.api.reading.json_body import JsonRoute
from evalstop_service.web.api.schemas import Answer, Body, Name, Scope, Time
from evalstop_service.web.context import Admin, Db, Keys, Now

router = APIRouter(prefix="/keys", tags=["keys"], route_class=JsonRoute)


class KeyIn(Body):
    """A new key of this project."""

    name: Name = Field(examples=["trainers"])
    scopes: Annotated[list[Scope], Field(min_length=1, max_length=4, fail_fast=True)] = Field(examples=[["ingest"]])


class KeyOut(Answer):
    """A key without its secret."""

    id: UUID
    name: str
    scopes: list[Scope]
    created_at: Time
    revoked_at: Time | None


class NewKeyOut(KeyOut):
    """A key with its secret, which is shown once."""

    key: str


class KeyList(Answer):
    """The project's keys, oldest first."""

    items: list[KeyOut]


@router.get("")
def list_keys(caller: Admin, database: Db) -> KeyList:
    """All keys of the project, revoked ones included."""
    with database.reading() as tx:
        return KeyList.model_validate({"items": keys.list_keys(tx, caller.project_id)})


@router.post("", status_code=201)
def create_key(body: KeyIn, caller: Admin, database: Db, now: Now) -> NewKeyOut:
    """Create a key."""
    key, secret = api_keys.create_key(database, caller.project_id, caller.actor, body.name, body.scopes, now)
    return NewKeyOut.model_validate(vars(key) | {"key": secret})


@router.delete("/{key_id}", status_code=204)
def revoke_key(key_id: UUID, caller: Admin, database: Db, key_cache: Keys, now: Now) -> None:
    """Revoke a key."""
    api_keys.revoke_key(database, key_cache, caller.author(now), key_id)
