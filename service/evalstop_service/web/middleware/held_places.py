"""Lets a request hold its place of a fair share until it is answered; a FastAPI dependency that yields costs more."""

from __future__ import annotations

from contextlib import ExitStack

from starlette.types import ASGIApp, Receive, Scope, Send

from evalstop_service.web.context import HELD_PLACES


class HeldPlaces:
    """ASGI middleware: releases the places that are held in `scope[HELD_PLACES]` after the answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with ExitStack() as scope[HELD_PLACES]:
            await self._app(scope, receive, send)
