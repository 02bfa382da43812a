"""Live updates of an open page: server-sent events while its visitor may see it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from fastapi import Depends, Header, Request, Response

from evalstop_service.store.database import Transaction
from evalstop_service.web.dashboard.cookies import SESSION, read_cookie
from evalstop_service.web.dashboard.visitor import Site, find_visitor


async def _seen_revision(seen: str = "", last_event_id: Annotated[str | None, Header()] = None) -> str:
    return last_event_id or seen


SeenRevision = Annotated[str, Depends(_seen_revision)]
"""The revision that the page shows: from rendering it, or from the last event."""


def stream_changes(
    request: Request, site: Site, seen_revision: str, revision: Callable[[Transaction], str | None]
) -> Response:
    """Send an event whenever `revision` changes; the stream ends when it is None or the visitor is signed out."""

    def read_revision() -> str | None:
        with site.database.reading() as tx:
            return None if find_visitor(tx, site, request) is None else revision(tx)

    return site.streams.open_stream(read_cookie(request, SESSION), seen_revision, read_revision)
