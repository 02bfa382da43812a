"""Identifies the sender of a request by its headers or its link, before any of the body is held."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from uuid import UUID

from anyio import to_thread
from fastapi import Request
from starlette.types import Scope

from evalstop_service.decisions import message_links
from evalstop_service.errors import TooOften
from evalstop_service.security.scopes import VisitorRole
from evalstop_service.store.turns import Work
from evalstop_service.web.context import read_address, read_secret
from evalstop_service.web.limits import LIMITS, is_decision_path
from evalstop_service.web.pages.cookies import SESSION, read_cookie
from evalstop_service.web.pages.visitor import Site, identify_visitor


@dataclass(frozen=True)
class Sender:
    """The sender of a request, by its headers. `known`: a valid key or session; `operates`: may veto in its project;
    `reports`: may report on stops there."""

    work: Work
    known: bool = False
    operates: bool = False
    reports: bool = False
    project_id: UUID | None = None


_LINK = re.compile(r"/act/([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})/([^/]+)/(?:veto|wait)")


def create_identify(site: Site) -> Callable[[Scope], Awaitable[Sender]]:
    """A function that identifies the sender of a request; raises the database's errors if it is unavailable."""
    key_cache = site.context.key_cache

    def find_link_holder(delivery_id: UUID, token: str) -> Sender | None:
        with site.database.reading() as tx:
            link = message_links.open_link(tx, site.context.encryption, delivery_id, token, site.clock())
        if link is None:
            return None
        # A link that offers nothing more must not extend windows by requests that fail.
        return Sender(Work(delivery_id, link.project.id), True, bool(link.choices), True, link.project.id)

    async def identify(scope: Scope) -> Sender:
        # The link in a message says who sends, so that strangers at the same address hold up nobody who has it.
        if match := _LINK.fullmatch(scope["path"]):
            find = partial(find_link_holder, UUID(match[1]), match[2])
            holder = await to_thread.run_sync(find, limiter=LIMITS.get().authentication)
            if holder is not None:
                return holder
        request = Request(scope)
        address = read_address(request)
        secret = read_secret(request.headers.get("authorization", ""))
        if secret is not None:
            try:
                urgent = is_decision_path(scope["path"])
                key = await key_cache.authenticate_in_thread(secret, address, urgent, LIMITS.get().authentication)
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
