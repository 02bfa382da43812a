"""The dashboard: server-rendered pages for operators."""

from __future__ import annotations

from uuid import UUID

from fastapi import FastAPI

from evalstop_service.clock import Clock
from evalstop_service.store.database import Database


def install(app: FastAPI, database: Database, clock: Clock, session_secret: str) -> None:
    """Add the pages to the app."""


def sign_in_token(session_secret: str, key_id: UUID) -> str:
    """A signed token that signs a browser in."""
    return ""
