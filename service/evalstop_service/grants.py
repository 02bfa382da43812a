"""What a visitor of the pages may do in a project: look, operate, administer."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum


class VisitorRole(StrEnum):
    """What a visitor may do. Each may do all that those before it may."""

    VIEWER = "viewer"
    OPERATOR = "operator"
    ADMIN = "admin"

    def covers(self, wanted: VisitorRole) -> bool:
        """Whether this role may do what `wanted` may."""
        return _RANKS.index(self) >= _RANKS.index(wanted)


_RANKS = tuple(VisitorRole)


def of_scopes(scopes: Iterable[str]) -> VisitorRole | None:
    """The role that a key's scopes give; None where they do not open the pages."""
    held = set(scopes)
    if "admin" in held:
        return VisitorRole.ADMIN
    if "read" not in held:
        return None
    return VisitorRole.OPERATOR if "operate" in held else VisitorRole.VIEWER
