"""Who sends a request, as its head shows: a key, a session of the pages, or nobody known."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from anyio import CapacityLimiter, to_thread
from fastapi import Request
from starlette.types import Scope

from evalstop_service.security.scopes import VisitorRole
from evalstop_service.web.dashboard.cookies import SESSION
from evalstop_service.web.dashboard.visitor import Site, find_visitor
from evalstop_service.web.middleware.held_bodies import Sender
from evalstop_service.web.mlflow.authentication import read_secret

THREADS = 4
"""Of their own, so that wrong keys take none from the routes."""


def create_identify(site: Site) -> Callable[[Scope], Awaitable[Sender]]:
    """A function that tells who sends a request; raises what the database raises when it is away."""
    limiter = CapacityLimiter(THREADS)
    key_cache = site.context.key_cache

    async def identify(scope: Scope) -> Sender:
        request = Request(scope)
        address = f"address {(scope.get('client') or ('-',))[0]}"
        secret = read_secret(request.headers.get("authorization", ""))
        if secret is not None:
            key = key_cache.get(secret) or await to_thread.run_sync(key_cache.authenticate, secret, limiter=limiter)
            if key is not None:
                return Sender(f"key {key.id}", known=True, operates=not {"operate", "admin"}.isdisjoint(key.scopes))
        elif SESSION in request.cookies:
            role = await to_thread.run_sync(_find_role, site, request, limiter=limiter)
            if role is not None:
                session = f"session {request.cookies[SESSION]}"
                return Sender(session, known=True, operates=role.covers(VisitorRole.OPERATOR))
        return Sender(address)

    return identify


def _find_role(site: Site, request: Request) -> VisitorRole | None:
    with site.database.reading() as tx:
        visitor = find_visitor(tx, site, request)
    return None if visitor is None else visitor.role
