"""Identifiers: UUIDv7, which sort by creation time."""

from __future__ import annotations

from uuid import UUID

from uuid_utils.compat import uuid7


def new_id() -> UUID:
    """A new UUIDv7."""
    return uuid7()
