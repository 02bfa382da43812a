"""Live updates of an open page: server-sent events while its visitor may see it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from fastapi import Depends, Header, Request, Response

from evalstop_service.store.database import Transaction
from evalstop_service.store.turns import WORK
from evalstop_service.web.dashboard.visitor import SiteOf, find_visitor

FollowRevision = Callable[[Callable[[Transaction], str | None]], Response]


async def _follow_revision(
    request: Request, site: SiteOf, seen: str = "", last_event_id: Annotated[str | None, Header()] = None
) -> FollowRevision:
    def follow(revision: Callable[[Transaction], str | None]) -> Response:
        def read_revision() -> str | None:
            with site.database.reading() as tx:
                return None if find_visitor(tx, site, request) is None else revision(tx)

        return site.streams.open_stream(WORK.get(), last_event_id or seen, read_revision)

    return follow


Follow = Annotated[FollowRevision, Depends(_follow_revision)]
"""Sends an event whenever a revision changes from the one that the page shows, which was rendered with it or got it by
the last event; the stream ends when the revision is None or the visitor is signed out."""
