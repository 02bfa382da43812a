"""Routes of API keys: who may use the API."""

from __future__ import annotations

from typing import Annotated
from uuid import UUID

from fastapi import Path, Query
from pydantic import Field

from evalstop_service.domain.fields import Body, Name, Rule
from evalstop_service.projects import api_keys
from evalstop_service.security.address_policy import check_network
from evalstop_service.store import keys
from evalstop_service.store.keys import Key, KeyLimits
from evalstop_service.web.api.json_body import create_router
from evalstop_service.web.api.list_filters import ListQuery
from evalstop_service.web.api.schemas import Answer, Page, Scope, Time, answers
from evalstop_service.web.context import Admin, AnyScopeOrBound, Ctx, Db, Now

NETWORK = r"^[0-9A-Fa-f:.]+(/[0-9]+)?$"

NetworkIn = Annotated[str, Field(min_length=1, max_length=50), Rule(check_network, {"pattern": NETWORK})]
IdIn = Annotated[UUID, Field(strict=False)]
KeyId = Annotated[UUID, Path(description="`id` of the key, as returned when it was created or listed")]

router = create_router("keys")


class KeyIn(Body):
    """A new key of this project."""

    name: Name = Field(description="for people; shown in the audit log", examples=["trainers"])
    scopes: Annotated[list[Scope], Field(min_length=1, max_length=5, fail_fast=True)] = Field(
        description="what it may do", examples=[["ingest"]]
    )
    expires_at: Time | None = Field(None, description="when it expires; null: never")
    networks: Annotated[list[NetworkIn], Field(max_length=50, fail_fast=True)] = Field(
        [], description="CIDRs of the networks from which it is accepted; none: any"
    )
    endpoint_ids: Annotated[list[IdIn], Field(max_length=50, fail_fast=True)] = Field(
        [], description="for the scope report: the endpoints whose stops it may fetch and report on; none: all"
    )

    @property
    def limits(self) -> KeyLimits:
        """The limits of the key in addition to its scopes."""
        return KeyLimits(self.expires_at, tuple(self.networks), tuple(self.endpoint_ids))


@answers(Key)
class KeyOut(Answer):
    """A key without its secret."""

    scopes: list[Scope] = Field(description="what it may do")


class NewKeyOut(KeyOut):
    """A key with its secret, which is shown only once."""

    key: str = Field(description="the secret to send as a bearer token; shown only once")


@router.get("/key")
def get_own_key(caller: AnyScopeOrBound) -> KeyOut:
    """The key of the request, with its scopes and expiry."""
    return KeyOut.model_validate(caller.key)


@router.get("/keys")
def list_keys(caller: Admin, database: Db, query: Annotated[ListQuery, Query()]) -> Page[KeyOut]:
    """The keys of the project, revoked ones included, newest first."""
    with database.reading() as tx:
        return Page[KeyOut].of(keys.list_keys(tx, caller.project_id, **query.to_arguments()), query.limit)


@router.post("/keys", status_code=201)
def create_key(body: KeyIn, caller: Admin, database: Db, now: Now) -> NewKeyOut:
    """Create a key."""
    made = (database, caller.project_id, caller.actor, body.name, body.scopes, now, body.limits)
    key, secret = api_keys.create_key(*made)
    return NewKeyOut.model_validate(vars(key) | {"key": secret})


@router.delete("/keys/{key_id}", status_code=204)
def revoke_key(key_id: KeyId, caller: Admin, context: Ctx, now: Now) -> None:
    """Revoke a key."""
    api_keys.revoke_key(context.database, context.key_cache, caller.author(now), key_id)
