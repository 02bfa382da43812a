"""How an open page follows what it shows: it is told of changes as long as its visitor may see them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from fastapi import Depends, Header, Request, Response

from evalstop_service.store.database import Transaction
from evalstop_service.web.dashboard.visitor import Site, known


def _seen(since: str = "", last_event_id: Annotated[str | None, Header()] = None) -> str:
    return last_event_id or since


Seen = Annotated[str, Depends(_seen)]
"""The revision that the page knows: the one that it was rendered with, or the last that it was told."""


def follow(request: Request, site: Site, seen: str, revision: Callable[[Transaction], str | None]) -> Response:
    """Tell whenever `revision` reads as another; the stream ends where it is None or the visitor is signed out."""

    def poll() -> str | None:
        with site.database.reading() as tx:
            return None if known(tx, site, request) is None else revision(tx)

    return site.streams.answer(seen, poll)
