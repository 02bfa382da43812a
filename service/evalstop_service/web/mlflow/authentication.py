"""Authentication of MLflow clients: a key as bearer token, or as the password of basic authentication."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Awaitable, Callable
from typing import Annotated

from fastapi import Depends, Request

from evalstop_service.store.keys import Key
from evalstop_service.web.api.reading.json_body import JsonRoute
from evalstop_service.web.context import Caller, Context, allowed, read_address, refuse_key
from evalstop_service.web.limits import LIMITS, hold_place, set_sender

_UNAUTHENTICATED = refuse_key(
    "set MLFLOW_TRACKING_TOKEN to an active key, or MLFLOW_TRACKING_PASSWORD with any MLFLOW_TRACKING_USERNAME"
)


async def authenticate_request(request: Request) -> Key:
    """The key of a request; raises Problem unless it is valid."""
    context: Context = request.app.state.context
    secret = read_secret(request.headers.get("authorization", ""))
    key = None
    if secret is not None:
        threads = LIMITS.get().authentication
        key = await context.key_cache.authenticate_together(secret, read_address(request), threads=threads)
    if key is None:
        raise _UNAUTHENTICATED
    set_sender(key.id, key.project_id)
    return key


def read_secret(header: str) -> str | None:
    """The secret in an `Authorization` header, bearer or basic; None if there is none."""
    scheme, _, credentials = header.partition(" ")
    match scheme.lower():
        case "bearer":
            return credentials
        case "basic":
            try:
                name, colon, password = base64.b64decode(credentials, validate=True).decode().partition(":")
            except (binascii.Error, ValueError):
                return None
            return password if colon and name else None
    return None


class MlflowRoute(JsonRoute):
    """A route of MLflow's API; its body is read only after authentication."""

    insist = staticmethod(authenticate_request)


def _require_scope(*scopes: str) -> Callable[..., Awaitable[Caller]]:
    async def authorize(key: Annotated[Key, Depends(authenticate_request)], request: Request) -> Caller:
        granted = allowed(key, *scopes)
        hold_place(LIMITS.get().requests)
        return granted

    return authorize


Ingest = Annotated[Caller, Depends(_require_scope("ingest"))]
Read = Annotated[Caller, Depends(_require_scope("read"))]
ReadOrIngest = Annotated[Caller, Depends(_require_scope("read", "ingest"))]
