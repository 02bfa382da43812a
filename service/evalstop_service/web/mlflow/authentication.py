"""Who is speaking: a key as bearer token or, as MLflow's clients can send it too, as password to any name."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from typing import Annotated

from fastapi import Depends, Request
from fastapi.concurrency import run_in_threadpool

from evalstop_service.store.keys import Key
from evalstop_service.web.api.reading.json_body import JsonRoute
from evalstop_service.web.context import Caller, Context, allowed
from evalstop_service.web.problems import Problem

_UNAUTHENTICATED = Problem(
    401,
    "No valid key",
    "set MLFLOW_TRACKING_TOKEN to a key that is in use, or MLFLOW_TRACKING_PASSWORD and any MLFLOW_TRACKING_USERNAME; "
    "`evalstop key create` makes one",
    headers={"WWW-Authenticate": "Bearer"},
)


async def key_of(request: Request) -> Key:
    """The key that speaks. Raises Problem unless it is a valid one."""
    context: Context = request.app.state.context
    secret = secret_in(request.headers.get("authorization", ""))
    key = None
    if secret is not None:
        key = context.key_cache.get(secret) or await run_in_threadpool(context.key_cache.authenticate, secret)
    if key is None:
        raise _UNAUTHENTICATED
    return key


def secret_in(header: str) -> str | None:
    """The key in an `Authorization` header, bearer or basic; None when there is none to be read."""
    scheme, _, said = header.partition(" ")
    match scheme.lower():
        case "bearer":
            return said
        case "basic":
            try:
                name, colon, password = base64.b64decode(said, validate=True).decode().partition(":")
            except (binascii.Error, ValueError):
                return None
            return password if colon and name else None
    return None


class Verb(JsonRoute):
    """A route of MLflow's: its body is not read before a key has spoken."""

    insist = staticmethod(key_of)


def _may(*scopes: str) -> Callable[[Key], Caller]:
    def caller(key: Annotated[Key, Depends(key_of)]) -> Caller:
        return allowed(key, *scopes)

    return caller


Ingesting = Annotated[Caller, Depends(_may("ingest"))]
Reading = Annotated[Caller, Depends(_may("read"))]
Either = Annotated[Caller, Depends(_may("read", "ingest"))]
