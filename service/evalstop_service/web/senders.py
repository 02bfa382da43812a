"""Identifies the sender of a request by its headers: a key, a session, or unknown."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import Request
from starlette.types import Scope

from evalstop_service.errors import TooOften
from evalstop_service.security.scopes import VisitorRole
from evalstop_service.store.turns import Work
from evalstop_service.web.body import Sender
from evalstop_service.web.context import read_address
from evalstop_service.web.dashboard.cookies import SESSION, read_cookie
from evalstop_service.web.dashboard.visitor import Site, identify_visitor
from evalstop_service.web.limits import LIMITS, is_decision_path
from evalstop_service.web.mlflow.protocol import read_secret


def create_identify(site: Site) -> Callable[[Scope], Awaitable[Sender]]:
    """A function that identifies the sender of a request; raises the database's errors if it is unavailable."""
    key_cache = site.context.key_cache

    async def identify(scope: Scope) -> Sender:
        request = Request(scope)
        address = read_address(request)
        secret = read_secret(request.headers.get("authorization", ""))
        if secret is not None:
            try:
                urgent = is_decision_path(scope["path"])
                key = await key_cache.authenticate_together(secret, address, urgent, LIMITS.get().authentication)
            except TooOften:  # unknown senders get a small share; the route explains the refusal
                key = None
            if key is not None:
                operates = not {"operate", "admin"}.isdisjoint(key.scopes)
                reports = operates or "report" in key.scopes
                return Sender(Work(key.id, key.project_id), True, operates, reports, key.project_id)
        elif read_cookie(request, SESSION):
            visitor = await identify_visitor(request, site)
            if visitor is not None:
                operates = visitor.role.covers(VisitorRole.OPERATOR)
                return Sender(Work(visitor.identity, visitor.project.id), True, operates, operates, visitor.project.id)
        return Sender(Work(address))

    return identify
